"""What is sent to a server, in which form, and which of its replies become completions."""

import json

import pytest

from blockdraft.data import EngineError, GenerationSettings
from blockdraft.targets import Sampling

from scripted import TEXT, WORDS, after_probe, answered, completion, conversations, engine_for, only
from tiny import EOS, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_every_field_is_sent(target, serve):
    server = serve()
    settings = GenerationSettings(Sampling(0.7, 5, 0.9), max_new_tokens=50, max_length=60)
    conversation = only(answered(target, server, settings=settings))
    (sent,) = server.asked
    (asked,) = conversations(target, 1, settings=settings)
    assert sent == {
        "model": "tiny",
        "prompt": conversation.completions[0].prompt_ids,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "use_beam_search": False,
        "watermarking": False,
        "seed": asked.request.seed % 2**31,
        "n": 1,
        "max_tokens": 50,
        "min_tokens": 0,
        "stop": None,
        "stop_token_ids": [EOS],
        "ignore_eos": False,
        "stream": False,
        "logprobs": None,
        "echo": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "no_stop_trim": True,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    assert server.paths == ["/v1/completions"] * 2


def test_the_whole_vocabulary_is_asked_for_as_minus_one(target, serve):
    server = serve()
    answered(target, server)
    assert server.asked[0]["top_k"] == -1
    assert (server.asked[0]["temperature"], server.asked[0]["top_p"]) == (1.0, 1.0)


def test_the_budget_shrinks_with_the_prompt(target, serve):
    server = serve()
    answered(target, server, turns=("w10", "w11"), settings=GenerationSettings(max_new_tokens=10, max_length=16))
    assert [body["max_tokens"] for body in server.asked] == [min(10, 16 - len(b["prompt"])) for b in server.asked]
    assert server.asked[1]["max_tokens"] < 10


def test_ids_are_taken_from_the_server(target, serve):
    server = serve(lambda body, _: completion(body, [*WORDS, EOS], text="something else"))
    row = only(answered(target, server)).completions[0]
    assert (row.response_ids, row.finish_reason) == ([*WORDS, EOS], "stop")


def test_describe_says_how_each_server_is_used(target, serve):
    server = serve()
    assert engine_for(target, server).describe() == {
        "concurrency": 4,
        "servers": [
            {
                "url": server.url,
                "model": "tiny",
                "prompts": "token ids",
                "token_ids": "server",
                "generation_config": False,
                "refused_fields": [],
                "sampling_left_to_server": [],
            }
        ],
    }


def test_text_is_tokenised_again(target, serve):
    server = serve(lambda body, _: completion(body, text=TEXT, count=4))
    engine = engine_for(target, server)
    assert engine.describe()["servers"][0]["token_ids"] == "re-tokenised"
    assert only(answered(target, server)).completions[0].response_ids == [*WORDS, EOS]


def test_text_may_show_its_end_token(target, serve):
    server = serve(lambda body, _: completion(body, text=TEXT + " <eos>", count=4))
    assert only(answered(target, server)).completions[0].response_ids == [*WORDS, EOS]


DROPS = {
    "its text does not survive tokenisation": {"text": "w7  w8"},
    "its text has another number of tokens than were sampled": {"text": TEXT, "count": 6},
    "finish reason 'content_filter'": {"token_ids": WORDS, "finish": "content_filter"},
    "finish reason None": {"token_ids": WORDS, "finish": None},
    "token ids outside the vocabulary": {"token_ids": [7, 40, EOS]},
    "its token ids are not integers": {"token_ids": ["7"]},
    "its text is not text": {"text": ["w7"]},
    "finish reason ['stop']": {"token_ids": WORDS, "finish": ["stop"]},
    "stopped at False, which is no end token": {"token_ids": WORDS, "stop_reason": False},
    "longer than its budget": {"token_ids": [7] * 9, "finish": "length"},
    "goes on after an end token": {"token_ids": [7, EOS, 8, EOS]},
    "stopped at 9, which is no end token": {"token_ids": WORDS, "stop_reason": 9},
    "stopped at 'w9', which is no end token": {"token_ids": WORDS, "matched_stop": "w9"},
    "the server read other prompt tokens": {"token_ids": [7, EOS], "prompt_token_ids": [1, 2]},
}


@pytest.mark.parametrize("reason", DROPS)
def test_rows_that_cannot_be_told_are_dropped(reason, target, serve):
    server = serve(after_probe(lambda body, _: completion(body, **DROPS[reason])))
    conversation = only(answered(target, server, settings=GenerationSettings(max_new_tokens=8)))
    assert (conversation.dropped, conversation.completions) == (reason, [])


@pytest.mark.parametrize("reply", [{"token_ids": [], "finish": "length"}, {"token_ids": []}])
def test_empty_responses_are_dropped(reply, target, serve):
    server = serve(after_probe(lambda body, _: completion(body, **reply)))
    assert only(answered(target, server)).dropped == "empty response"


def test_an_end_token_alone_is_a_response(target, serve):
    server = serve(after_probe(lambda body, _: completion(body, text="", count=1)))
    assert only(answered(target, server)).completions[0].response_ids == [EOS]


def test_text_that_ran_out_of_budget_must_have_as_many_tokens(target, serve):
    server = serve(lambda body, _: completion(body, text=TEXT, finish="length", count=3))
    row = only(answered(target, server)).completions[0]
    assert (row.response_ids, row.finish_reason) == (WORDS, "length")
    server = serve(lambda body, _: completion(body, text=TEXT, finish="length", count=4))
    assert only(answered(target, server)).dropped is not None


def test_a_prompt_of_another_length_drops_the_row(target, serve):
    def answer(body, _):
        reply = completion(body, [7, EOS])
        reply["usage"]["prompt_tokens"] += 1
        return reply

    conversation = only(answered(target, serve(after_probe(answer))))
    assert conversation.dropped == "the server read another number of prompt tokens"


@pytest.mark.parametrize(
    ("end", "put_back"), [({"stop_reason": None}, EOS), ({"stop_reason": 3}, 3), ({"matched_stop": 3}, 3)]
)
def test_an_end_token_left_out_is_put_back(end, put_back, serve):
    target = tiny_target(eos=[EOS, 3])
    conversation = only(answered(target, serve(after_probe(lambda body, _: completion(body, WORDS, **end)))))
    assert conversation.completions[0].response_ids == [*WORDS, put_back]


def test_an_end_token_that_could_be_either_drops_the_row(serve):
    target = tiny_target(eos=[EOS, 3])
    conversation = only(answered(target, serve(after_probe(lambda body, _: completion(body, WORDS)))))
    assert conversation.dropped == "stopped at an end token that cannot be told"


def test_text_without_the_number_of_its_tokens_drops_the_row(target, serve):
    server = serve(after_probe(lambda body, _: completion(body, text="w7 w8")))
    assert only(answered(target, server)).dropped == "neither token ids nor their number came with its text"


def test_a_response_cut_by_its_budget_stays_as_it_is(target, serve):
    conversation = only(answered(target, serve(lambda body, _: completion(body, WORDS, finish="length"))))
    assert (conversation.completions[0].response_ids, conversation.completions[0].finish_reason) == (WORDS, "length")


def test_turns_come_in_order_on_top_of_the_answers(target, serve):
    server = serve(lambda body, number: completion(body, [10 + number, EOS]))
    conversation = only(answered(target, server, turns=("w20", "w21", "w22"), concurrency=3))
    assert [row.response_ids[0] for row in conversation.completions] == [11, 12, 13]
    assert [body["prompt"] for body in server.asked] == [row.prompt_ids for row in conversation.completions]
    assert target.decode(server.asked[2]["prompt"]).startswith("user w20 assistant w11 user w21 assistant w12")


def test_a_dropped_turn_leaves_the_earlier_rows(target, serve):
    server = serve(lambda body, number: completion(body, [7, EOS] if number < 2 else [99]))
    conversation = only(answered(target, server, turns=("w20", "w21", "w22")))
    assert (len(conversation.completions), conversation.dropped) == (1, "token ids outside the vocabulary")


def test_a_conversation_with_nothing_to_ask_comes_back_at_once(target, serve):
    server = serve()
    conversation = only(answered(target, server, settings=GenerationSettings(max_length=3)))
    assert conversation.dropped == "prompt too long"
    assert server.asked == []


@pytest.mark.parametrize("odd", [[True, EOS], [7.0, EOS], [None], {"7": 0}, 7, "7", [[7], EOS], [2**70, EOS], [-1]])
def test_odd_token_ids_reach_no_row(odd, target, serve):
    conversation = only(answered(target, serve(after_probe(lambda body, _: completion(body, odd)))))
    assert conversation.dropped in ("its token ids are not integers", "token ids outside the vocabulary")
    assert (conversation.failed, conversation.completions) == (True, [])


@pytest.mark.parametrize("odd", [7, "7", {"a": 1}, [None], True])
def test_odd_accounts_of_the_prompt_are_no_traceback(odd, target, serve):
    server = serve(after_probe(lambda body, _: completion(body, [7, EOS], prompt_token_ids=odd)))
    assert only(answered(target, server)).dropped == "the server read other prompt tokens"


@pytest.mark.parametrize("usage", [7, [], {"prompt_tokens": True}, {"prompt_tokens": "4"}, {"prompt_tokens": 10**30}])
def test_odd_counts_are_no_traceback(usage, target, serve):
    server = serve(after_probe(lambda body, _: completion(body, [7, EOS]) | {"usage": usage}))
    expected = "the server read another number of prompt tokens" if usage == {"prompt_tokens": 10**30} else None
    assert only(answered(target, server)).dropped == expected


def strict(known, *, ids=True, chat=True):
    """A server that refuses fields it does not know, by name."""

    def answer(body, _):
        unknown = sorted(set(body) - known - {"model", "prompt", "messages"})
        if unknown:
            return 422, {"detail": f"Unexpected fields in the request: {set(unknown)}"}
        if isinstance(body.get("prompt"), list) and not ids:
            return 400, {"detail": "prompt must be a string."}
        if "messages" in body:
            if not chat:
                return 404, {"detail": "Not Found"}
            words = sum(len(m["content"].split()) + 1 for m in body["messages"]) + 1
            reply = completion(body, count=4)
            reply["choices"][0]["message"] = {"content": TEXT}
            return reply | {"usage": {"prompt_tokens": words, "completion_tokens": 4}}
        return completion(body, text=TEXT, count=4)

    return answer


CORE = {"temperature", "top_p", "max_tokens", "seed", "n", "stop", "stream", "logprobs", "echo"}
CORE |= {"presence_penalty", "frequency_penalty"}


def test_a_server_that_takes_a_generation_config_gets_the_distribution_in_it(target, serve):
    server = serve(strict(CORE | {"generation_config"}, ids=False))
    settings = GenerationSettings(Sampling(0.7, 5, 0.9), max_new_tokens=50)
    conversation = only(answered(target, server, settings=settings))
    assert conversation.completions[0].response_ids == [*WORDS, EOS]
    sent = server.requests[-1]
    assert sent["prompt"] == "user w10 w11 assistant"
    assert set(sent) == CORE | {"model", "prompt", "generation_config"}
    config = json.loads(sent["generation_config"])
    assert config["do_sample"] is True
    assert (config["temperature"], config["top_k"], config["top_p"]) == (0.7, 5, 0.9)
    assert (config["max_new_tokens"], config["eos_token_id"]) == (50, [EOS])
    described = engine_for(target, server, settings=settings).describe()["servers"][0]
    assert (described["prompts"], described["token_ids"]) == ("text", "re-tokenised")
    assert (described["generation_config"], described["sampling_left_to_server"]) == (True, [])


def test_a_field_of_the_distribution_that_cannot_be_sent_is_said(target, serve):
    with pytest.warns(UserWarning, match="does not take top_k, min_p, repetition_penalty: its own defaults hold"):
        engine = engine_for(target, serve(strict(CORE)))
    described = engine.describe()["servers"][0]
    assert described["sampling_left_to_server"] == ["top_k", "min_p", "repetition_penalty"]
    assert "top_k" in described["refused_fields"]


def test_temperature_and_top_p_must_be_taken(target, serve):
    with pytest.raises(EngineError, match="no way that can be checked"):
        engine_for(target, serve(strict(CORE - {"top_p"})))


def test_messages_are_the_last_resort(target, serve):
    def answer(body, number):
        if "prompt" in body:
            return 404, {"detail": "Not Found"}
        return strict(CORE | {"generation_config", "chat_template_kwargs"})(body, number)

    server = serve(answer)
    assert only(answered(target, server)).completions[0].response_ids == [*WORDS, EOS]
    assert server.paths[-1] == "/v1/chat/completions"
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "w10 w11"}]
    assert server.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_text_that_a_server_took_apart_is_dropped(target, serve):
    def answer(body, _):
        if "prompt" in body:
            return 404, {"detail": "Not Found"}
        reply = completion(body)
        reply["choices"][0]["message"] = {"content": TEXT, "reasoning_content": "w9"}
        return reply | {"usage": {"prompt_tokens": len(body["messages"][0]["content"].split()) + 2}}

    assert only(answered(target, serve(answer))).dropped == "the server took the text apart"


def test_a_way_that_reads_another_prompt_is_not_used(target, serve):
    """A server that puts a token before text, and says nothing of what it read in messages."""

    def answer(body, _):
        if isinstance(body.get("prompt"), list):
            return 400, {"detail": "prompt must be a string."}
        reply = completion(body, [7, EOS])
        if "messages" in body:
            del reply["usage"]
        else:
            reply["usage"]["prompt_tokens"] += 1
        return reply

    with pytest.raises(EngineError, match="no way that can be checked") as caught:
        engine_for(target, serve(answer))
    assert "text: the server read another number of prompt tokens" in str(caught.value)
    assert "messages: the server does not say how many prompt tokens it read" in str(caught.value)
