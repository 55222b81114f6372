"""The server engine against scripted servers: what is sent, what is kept, what is dropped, what is an error."""

import json
import socket
import threading
import time

import pytest
from blockdraft.data.dialogue import Conversation, GenerationSettings
from blockdraft.data.link import Link

from blockdraft.data.engine import EngineError
from blockdraft.data.prompts import Prompt
from blockdraft.data.server import ServerEngine
from blockdraft.targets import Sampling

from scripted import Scripted, completion
from tiny import EOS, tiny_target

WORDS = [7, 8, 9]
TEXT = "w7 w8 w9"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def serve():
    """Scripted servers, stopped after the test."""
    started = []

    def start(answer=lambda body, _: completion(body, [*WORDS, EOS]), **options):
        started.append(Scripted(answer, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def after_probe(answer):
    """A server that takes the first request, which asks how it wants to be asked."""
    return lambda body, number: answer(body, number) if number else completion(body, [7], finish="length")


def engine_for(target, *servers, settings=None, **options):
    options = {"pause": 0.01, "retries": 3, "timeout": 20, "concurrency": 4} | options
    return ServerEngine([getattr(s, "url", s) for s in servers], target, settings or GenerationSettings(), **options)


def regenerate(target, *servers, count=1, turns=("w10 w11",), settings=None, **options):
    settings = settings or GenerationSettings()
    engine = engine_for(target, *servers, settings=settings, **options)
    dialogues = [Conversation(Prompt(f"p{i}", turns), i, target, settings) for i in range(count)]
    return list(engine.run(dialogues))


def only(done):
    (dialogue,) = done
    return dialogue


def test_every_field_is_sent(target, serve):
    server = serve()
    settings = GenerationSettings(Sampling(0.7, 5, 0.9), max_new_tokens=50, max_length=60)
    dialogue = only(regenerate(target, server, settings=settings))
    (sent,) = server.asked
    seed = Conversation(Prompt("p0", ("w10 w11",)), 0, target, settings).seed % 2**31
    assert sent == {
        "model": "tiny",
        "prompt": dialogue.rows[0].prompt_ids,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "use_beam_search": False,
        "watermarking": False,
        "seed": seed,
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
    regenerate(target, server)
    assert server.asked[0]["top_k"] == -1
    assert (server.asked[0]["temperature"], server.asked[0]["top_p"]) == (1.0, 1.0)


def test_the_budget_shrinks_with_the_prompt(target, serve):
    server = serve()
    regenerate(target, server, turns=("w10", "w11"), settings=GenerationSettings(max_new_tokens=10, max_length=16))
    assert [body["max_tokens"] for body in server.asked] == [min(10, 16 - len(b["prompt"])) for b in server.asked]
    assert server.asked[1]["max_tokens"] < 10


def test_ids_are_taken_from_the_server(target, serve):
    server = serve(lambda body, _: completion(body, [*WORDS, EOS], text="something else"))
    row = only(regenerate(target, server)).rows[0]
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
                "law_left_to_server": [],
            }
        ],
    }


def test_text_is_tokenised_again(target, serve):
    server = serve(lambda body, _: completion(body, text=TEXT, count=4))
    engine = engine_for(target, server)
    assert engine.describe()["servers"][0]["token_ids"] == "re-tokenised"
    assert only(regenerate(target, server)).rows[0].response_ids == [*WORDS, EOS]


def test_text_may_show_its_end_token(target, serve):
    server = serve(lambda body, _: completion(body, text=TEXT + " <eos>", count=4))
    assert only(regenerate(target, server)).rows[0].response_ids == [*WORDS, EOS]


DROPS = {
    "its text does not survive tokenisation": {"text": "w7  w8"},
    "its text has another number of tokens than were sampled": {"text": TEXT, "count": 6},
    "finish reason 'content_filter'": {"token_ids": WORDS, "finish": "content_filter"},
    "finish reason None": {"token_ids": WORDS, "finish": None},
    "token ids outside the vocabulary": {"token_ids": [7, 40, EOS]},
    "its token ids are not integers": {"token_ids": ["7"]},
    "longer than its budget": {"token_ids": [7] * 9, "finish": "length"},
    "goes on after an end token": {"token_ids": [7, EOS, 8, EOS]},
    "stopped at 9, which is no end token": {"token_ids": WORDS, "stop_reason": 9},
    "stopped at 'w9', which is no end token": {"token_ids": WORDS, "matched_stop": "w9"},
    "the server read other prompt tokens": {"token_ids": [7, EOS], "prompt_token_ids": [1, 2]},
}


@pytest.mark.parametrize("reason", DROPS)
def test_rows_that_cannot_be_told_are_dropped(reason, target, serve):
    server = serve(after_probe(lambda body, _: completion(body, **DROPS[reason])))
    dialogue = only(regenerate(target, server, settings=GenerationSettings(max_new_tokens=8)))
    assert (dialogue.dropped, dialogue.rows) == (reason, [])


@pytest.mark.parametrize("reply", [{"token_ids": [], "finish": "length"}, {"token_ids": []}])
def test_empty_responses_are_dropped(reply, target, serve):
    server = serve(after_probe(lambda body, _: completion(body, **reply)))
    assert only(regenerate(target, server)).dropped == "empty response"


def test_an_end_token_alone_is_a_response(target, serve):
    server = serve(after_probe(lambda body, _: completion(body, text="", count=1)))
    assert only(regenerate(target, server)).rows[0].response_ids == [EOS]


def test_text_that_ran_out_of_budget_must_have_as_many_tokens(target, serve):
    server = serve(lambda body, _: completion(body, text=TEXT, finish="length", count=3))
    row = only(regenerate(target, server)).rows[0]
    assert (row.response_ids, row.finish_reason) == (WORDS, "length")
    server = serve(lambda body, _: completion(body, text=TEXT, finish="length", count=4))
    assert only(regenerate(target, server)).dropped is not None


def test_a_prompt_of_another_length_drops_the_row(target, serve):
    def answer(body, _):
        reply = completion(body, [7, EOS])
        reply["usage"]["prompt_tokens"] += 1
        return reply

    dialogue = only(regenerate(target, serve(after_probe(answer))))
    assert dialogue.dropped == "the server read another number of prompt tokens"


@pytest.mark.parametrize(
    ("end", "put_back"), [({"stop_reason": None}, EOS), ({"stop_reason": 3}, 3), ({"matched_stop": 3}, 3)]
)
def test_an_end_token_left_out_is_put_back(end, put_back, serve):
    target = tiny_target(eos=[EOS, 3])
    dialogue = only(regenerate(target, serve(after_probe(lambda body, _: completion(body, WORDS, **end)))))
    assert dialogue.rows[0].response_ids == [*WORDS, put_back]


def test_an_end_token_that_could_be_either_drops_the_row(serve):
    target = tiny_target(eos=[EOS, 3])
    dialogue = only(regenerate(target, serve(after_probe(lambda body, _: completion(body, WORDS)))))
    assert dialogue.dropped == "stopped at an end token that cannot be told"


def test_text_without_the_number_of_its_tokens_drops_the_row(target, serve):
    server = serve(after_probe(lambda body, _: completion(body, text="w7 w8")))
    assert only(regenerate(target, server)).dropped == "neither token ids nor their number came with its text"


def test_a_response_cut_by_its_budget_stays_as_it_is(target, serve):
    dialogue = only(regenerate(target, serve(lambda body, _: completion(body, WORDS, finish="length"))))
    assert (dialogue.rows[0].response_ids, dialogue.rows[0].finish_reason) == (WORDS, "length")


def test_turns_come_in_order_on_top_of_the_answers(target, serve):
    server = serve(lambda body, number: completion(body, [10 + number, EOS]))
    dialogue = only(regenerate(target, server, turns=("w20", "w21", "w22"), concurrency=3))
    assert [row.response_ids[0] for row in dialogue.rows] == [11, 12, 13]
    assert [body["prompt"] for body in server.asked] == [row.prompt_ids for row in dialogue.rows]
    assert target.decode(server.asked[2]["prompt"]).startswith("user w20 assistant w11 user w21 assistant w12")


def test_a_dropped_turn_leaves_the_earlier_rows(target, serve):
    server = serve(lambda body, number: completion(body, [7, EOS] if number < 2 else [99]))
    dialogue = only(regenerate(target, server, turns=("w20", "w21", "w22")))
    assert (len(dialogue.rows), dialogue.dropped) == (1, "token ids outside the vocabulary")


def test_a_dialogue_with_nothing_to_ask_comes_back_at_once(target, serve):
    server = serve()
    dialogue = only(regenerate(target, server, settings=GenerationSettings(max_length=3)))
    assert dialogue.dropped == "prompt too long"
    assert server.asked == []


def test_requests_under_way_are_bounded_at_each_server(target, serve):
    first, second = serve(hold=0.02), serve(hold=0.02)
    done = regenerate(target, first, second, count=40, concurrency=3)
    assert sorted(d.index for d in done) == list(range(40))
    assert first.most_under_way <= 3
    assert second.most_under_way <= 3
    assert max(first.most_under_way, second.most_under_way) > 1
    assert len(first.asked) + len(second.asked) == 40
    assert min(len(first.asked), len(second.asked)) > 0


@pytest.mark.parametrize(
    "failure",
    [
        (503, {"error": {"message": "loading"}}),
        (429, "busy", {"Retry-After": "0"}),
        (500, "oops"),
        None,
        "<html>",
        {"choices": []},
    ],
)
def test_what_passes_is_tried_again(failure, target, serve):
    server = serve(after_probe(lambda body, n: failure_as_reply(failure) if n < 3 else completion(body, [7, EOS])))
    assert only(regenerate(target, server)).rows[0].response_ids == [7, EOS]
    assert len(server.asked) == 3
    assert server.asked[0] == server.asked[2]


def failure_as_reply(failure):
    return (200, failure) if isinstance(failure, str) else failure


def test_a_server_that_asks_for_time_gets_it(target, serve, monkeypatch):
    rests = []
    monkeypatch.setattr(Link, "_rest", lambda _, seconds: rests.append(seconds))
    answers = [(429, "busy", {"Retry-After": "30"}), (503, "busy"), (503, "busy", {"Retry-After": "tomorrow"})]
    server = serve(after_probe(lambda body, n: answers[n - 1] if n <= 3 else completion(body, [7, EOS])))
    assert only(regenerate(target, server, pause=1)).dropped is None
    assert rests[0] == 30
    assert 1 <= rests[1] <= 3
    assert 2 <= rests[2] <= 6


@pytest.mark.parametrize(
    ("garbage", "shown"),
    [("<html>proxy</html>", "not JSON: '<html>proxy</html>'"), ('{"object": "error"}', "without choices")],
)
def test_garbage_is_an_error_that_shows_it(garbage, shown, target, serve):
    server = serve(after_probe(lambda body, n: completion(body, [7, EOS]) if n == 1 else (200, garbage)))
    engine = engine_for(target, server, concurrency=1)
    run = engine.run([Conversation(Prompt(f"p{i}", ("w10",)), i, target, GenerationSettings()) for i in range(3)])
    assert next(run).rows[0].response_ids == [7, EOS]
    with pytest.raises(EngineError, match=shown) as caught:
        next(run)
    assert server.url in str(caught.value)
    assert "the same command goes on" in str(caught.value)
    assert sum(body == server.asked[1] for body in server.asked) == 4


def test_replies_that_came_before_the_error_was_seen_are_kept(target, serve):
    server = serve(lambda body, number: (200, "hm") if number == 2 else completion(body, [7, EOS]))
    engine = engine_for(target, server, concurrency=1, retries=0)
    run = engine.run([Conversation(Prompt(f"p{i}", ("w10",)), i, target, GenerationSettings()) for i in range(3)])
    assert next(run).index == 0
    outcomes = run.gi_frame.f_locals["work"].outcomes
    while outcomes.qsize() < 2:
        time.sleep(0.01)
    assert next(run).index == 2
    with pytest.raises(EngineError, match="garbage"):
        next(run)


def test_garbage_from_the_start_is_an_error(target, serve):
    with pytest.raises(EngineError, match="returns garbage: not JSON: 'hm'"):
        engine_for(target, serve(lambda *_: (200, "hm")))


def test_an_unreachable_server_is_named_at_once(target, serve):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for urls in ([url], [serve().url, url]):
        with pytest.raises(EngineError, match=f"{url}/v1 cannot be reached: .*refused"):
            engine_for(target, *urls)


def test_a_dying_server_hands_its_work_to_the_other(target, serve):
    died = threading.Event()

    def dies(body, number):
        if number < 3:
            return completion(body, [7, EOS])
        died.set()
        return None

    def waits(body, number):
        if number:
            died.wait(30)
        return completion(body, [*WORDS, EOS])

    done = regenerate(target, serve(dies), serve(waits), count=20)
    assert sorted(d.index for d in done) == list(range(20))
    assert all(d.dropped is None for d in done)
    assert sum(d.rows[0].response_ids == [7, EOS] for d in done) == 2


def test_when_no_server_is_left_the_finished_dialogues_are_kept(target, serve):
    def dies_after(count):
        return lambda body, n: completion(body, [7, EOS]) if n < count else None

    first, second = serve(dies_after(3)), serve(dies_after(3))
    run = engine_for(target, first, second, concurrency=1).run(
        [Conversation(Prompt(f"p{i}", ("w10",)), i, target, GenerationSettings()) for i in range(9)]
    )
    assert [next(run).dropped for _ in range(4)] == [None] * 4
    with pytest.raises(EngineError, match="no server is left") as caught:
        next(run)
    assert first.url in str(caught.value)
    assert second.url in str(caught.value)


def test_a_row_that_the_server_fails_on_is_dropped(target, serve):
    server = serve(lambda body, _: (500, "too odd") if 30 in body["prompt"] else completion(body, [7, EOS]))
    engine = engine_for(target, server)
    dialogues = [
        Conversation(Prompt(word, (word,)), i, target, GenerationSettings())
        for i, word in enumerate(("w10", "w30", "w11"))
    ]
    dropped = {d.prompt.id: d.dropped for d in engine.run(dialogues)}
    assert dropped == {"w10": None, "w11": None, "w30": "the server failed on it: 500: too odd"}


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_row_is_dropped_with_the_servers_reason(status, target, serve):
    said = {"error": {"message": "maximum context length is 16 tokens\nand more"}}
    server = serve(after_probe(lambda *_: (status, said)))
    dialogue = only(regenerate(target, server))
    assert dialogue.dropped == "refused by the server: maximum context length is 16 tokens"
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_that_concerns_all_rows_is_an_error(status, target, serve):
    with pytest.raises(EngineError, match=f"refuses requests: {status}: no"):
        regenerate(target, serve(after_probe(lambda *_: (status, {"detail": "no"}))))


def test_a_model_that_is_not_there_is_an_error(target, serve):
    with pytest.raises(EngineError, match="404: no such model"):
        engine_for(target, serve(lambda *_: (404, {"message": "no such model"})), model="other")


def test_the_key_is_sent_and_must_be_there(target, serve, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    server = serve()
    engine = engine_for(target, server, key_variable="A_KEY")
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in json.dumps(engine.describe())
    with pytest.raises(EngineError, match="NO_KEY"):
        engine_for(target, server, key_variable="NO_KEY")


def test_the_model_is_the_one_listed_or_the_one_given(target, serve):
    many, none = serve(models=("a", "b")), serve(models=())
    with pytest.raises(EngineError, match=r"lists 2 models \(a, b\)"):
        engine_for(target, many)
    with pytest.raises(EngineError, match=r"lists 0 models \(none\)"):
        engine_for(target, none)
    engine_for(target, many, none, model="b")
    assert {many.requests[0]["model"], none.requests[0]["model"]} == {"b"}
    with pytest.raises(EngineError, match="different names"):
        engine_for(target, serve(models=("a",)), serve(models=("b",)))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://user:pass@host/v1", "http://"])
def test_urls_that_are_none(url, target):
    with pytest.raises(EngineError, match="is not a server's URL"):
        engine_for(target, url)


def test_the_version_may_be_left_out_of_a_url_but_no_url_given_twice(target, serve):
    server = serve()
    assert engine_for(target, server.url.removesuffix("/v1") + "/").servers[0].url == server.url
    with pytest.raises(EngineError, match="once"):
        engine_for(target, server, server.url.removesuffix("/v1"))
    with pytest.raises(EngineError, match="none"):
        engine_for(target)


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


def test_a_server_that_takes_a_generation_config_gets_the_law_in_it(target, serve):
    server = serve(strict(CORE | {"generation_config"}, ids=False))
    settings = GenerationSettings(Sampling(0.7, 5, 0.9), max_new_tokens=50)
    dialogue = only(regenerate(target, server, settings=settings))
    assert dialogue.rows[0].response_ids == [*WORDS, EOS]
    sent = server.requests[-1]
    assert sent["prompt"] == "user w10 w11 assistant"
    assert set(sent) == CORE | {"model", "prompt", "generation_config"}
    config = json.loads(sent["generation_config"])
    assert config["do_sample"] is True
    assert (config["temperature"], config["top_k"], config["top_p"]) == (0.7, 5, 0.9)
    assert (config["max_new_tokens"], config["eos_token_id"]) == (50, [EOS])
    described = engine_for(target, server, settings=settings).describe()["servers"][0]
    assert (described["prompts"], described["token_ids"]) == ("text", "re-tokenised")
    assert (described["generation_config"], described["law_left_to_server"]) == (True, [])


def test_a_field_of_the_law_that_cannot_be_sent_is_said(target, serve):
    with pytest.warns(UserWarning, match="does not take top_k, min_p, repetition_penalty: its own defaults hold"):
        engine = engine_for(target, serve(strict(CORE)))
    described = engine.describe()["servers"][0]
    assert described["law_left_to_server"] == ["top_k", "min_p", "repetition_penalty"]
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
    assert only(regenerate(target, server)).rows[0].response_ids == [*WORDS, EOS]
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

    assert only(regenerate(target, serve(answer))).dropped == "the server took the text apart"


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


def test_closing_the_iterator_ends_the_requests_under_way(target, serve):
    let_go = threading.Event()

    def answer(body, number):
        if number > 1:
            let_go.wait(60)
        return completion(body, [7, EOS])

    server = serve(answer)
    engine = engine_for(target, server, concurrency=4)
    before = set(threading.enumerate())
    run = engine.run([Conversation(Prompt(f"p{i}", ("w10",)), i, target, GenerationSettings()) for i in range(20)])
    next(run)
    senders = [t for t in threading.enumerate() if t not in before and "_serve" in t.name]
    assert len(senders) == 4
    run.close()
    for thread in senders:
        thread.join(30)  # they wait for a server that will not answer, unless they are cut short
    assert not any(thread.is_alive() for thread in senders)
    assert len(server.asked) <= 5
    let_go.set()
