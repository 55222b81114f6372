"""Show a frozen language model the way a drafter needs it, and say which distribution is sampled from its logits."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockdraft.errors import BlockdraftError, first_line
from blockdraft.targets.attention import Span, SpanAttention, attending, span_positions
from blockdraft.targets.cache import KVCache
from blockdraft.targets.decoder import Decoder, decoder_of, weights_key

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the names that users and configurations give them."""

NORMALIZER_BYTES = 2**26
"""Size of the logits that `Target.normalizer` makes at once."""

CPU_ROWS, RUN = 8, 256
"""On a CPU, so many rows of logits are summed at a time, which its caches hold, in runs of so many tokens."""

FEW_ROWS = 64
"""Up to this number of rows, a product with the head uses packed weights where there are any."""

Message = dict[str, str]
"""``{"role": "user", "content": "..."}``."""


class UnsupportedTargetError(BlockdraftError):
    """This project cannot draft for the model, and the message says why."""


@dataclass(frozen=True)
class TargetOutput:
    """Holds what one pass of the target over N sequences of T tokens gave.

    hidden: ``[N, T, H]`` after the final norm; the head's input.
    features: ``[N, T, K * H]`` outputs of the K chosen decoder layers, side by side; None if none were chosen.
    normalizer: log Z and argmax of the head's logits, for a drafter over fewer tokens; zero where no block reads them.
    """

    hidden: Tensor
    features: Tensor | None
    normalizer: "Normalizer | None" = None


@dataclass(frozen=True)
class Normalizer:
    """Holds what a head over some tokens cannot know of the whole vocabulary, at every position.

    log_z: ``[..]`` log sum_v exp(z_v / temperature). argmax: ``[..]`` the most probable token.
    """

    log_z: Tensor
    argmax: Tensor


@dataclass(frozen=True)
class Sampling:
    """Says which distribution is sampled from. Verification is lossless for this very one.

    temperature: 0 is greedy.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature and top_k must not be negative and top_p must lie in (0, 1]: "
                f"{self.temperature}, {self.top_k}, {self.top_p}"
            )

    def probs(self, logits: Tensor) -> Tensor:
        """Return the probabilities ``[..., V]`` in float32."""
        if self.temperature == 0:
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            lowest = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        probs = logits.softmax(-1)
        if self.top_p < 1:
            ordered, order = probs.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            ordered = ordered.masked_fill(before >= self.top_p, 0)
            probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


class Target:
    """Holds a causal language model in evaluation mode, without gradients, and its tokenizer.

    Feature of layer l is the output of decoder layer l before the final norm
    (``hidden_states[l + 1]`` in transformers). The last layer has none: what
    transformers calls its hidden state is already normalised.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        mask_token_id: int | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config
        _refuse_unsupported(model, name)
        _refuse_non_finite(model, name)
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.head = _weight(model.get_output_embeddings())
        self.embedding = _weight(model.get_input_embeddings())
        self.vocab_size = self.head.shape[0]
        self.eos_ids = _eos_ids(model, tokenizer, name)
        self._context_length = _context_length(self.config, name)
        self._given_mask = mask_token_id
        self._features: dict[int, Tensor] = {}
        self.use_decoder = True
        """Decode with the package's own forward pass where there is one; False goes through transformers."""
        self._decoder: Decoder | None = None
        self._decoder_key: object = None
        self.kept: dict[Hashable, Any] = {}
        """CUDA graphs that decoding keeps from text to text."""
        self._refuse_unfaithful()

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def context_length(self) -> int | None:
        """Give the longest text, prompt and response together, that positions allow; None if the config is silent."""
        return self._context_length

    @property
    def mask_token_id(self) -> int:
        """Give the row of the embedding that stands for a token to be drafted."""
        return find_mask_token(self)

    def feature_layers(self, num_features: int) -> tuple[int, ...]:
        """Return the layers that DFlash chooses for this number of features."""
        return choose_layers(self.name, self.num_layers, num_features)

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty KV cache for a text of up to ``capacity`` tokens.

        One text at a time behind it goes through the package's own forward pass where there is one: see
        `make_decoder`.
        """
        self.make_decoder()
        return KVCache(self.num_layers, capacity)

    def make_decoder(self) -> Decoder | None:
        """Return a `Decoder` of the weights as they are now, for a target of a known family; made once for them."""
        key = weights_key(self.model) if self.use_decoder else None
        if key is None:
            self._decoder, self._decoder_key = None, None
        elif key != self._decoder_key:
            self._decoder, self._decoder_key = decoder_of(self.model), key
        return self._decoder

    @property
    def decoder(self) -> Decoder | None:
        """Give the package's own forward pass, which reads the last cache made; None where transformers does it."""
        return self._decoder

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        layers: Sequence[int] = (),
        *,
        spans: Sequence[Span] | None = None,
        positions: Tensor | None = None,
        at: Tensor | None = None,
    ) -> TargetOutput:
        """Run over ``[N, T]`` tokens that follow what the cache holds, if there is one.

        With ``spans``, several texts are packed into rows; each is read as if it were alone, and what lies
        outside of them means nothing. Their ``positions`` ``[N, T]`` are derived from the spans unless given.

        With ``at`` ``[1]``, one text's tokens begin at a position that only the device knows, and shapes do not depend
        on it; that takes a `decoder`.
        """
        for layer in layers:
            if not 0 <= layer < self.num_layers - 1:
                raise ValueError(f"{self.name} has features of layers 0 to {self.num_layers - 2}, not of {layer}")
        if self._decoder is not None and cache is not None and spans is None and tokens.shape[0] == 1:
            hidden, features = self._decoder.forward(tokens[0], cache, layers, at)
            return TargetOutput(hidden[None], None if features is None else features[None])
        if at is not None:
            raise ValueError(f"{self.name} goes through transformers, which must know where the tokens stand")
        decoder = self.model.model
        hooks = [decoder.layers[layer].register_forward_hook(self._keep(layer)) for layer in layers]
        try:
            if spans is None:
                output = decoder(input_ids=tokens, past_key_values=cache, use_cache=cache is not None)
            else:
                if positions is None:
                    positions = span_positions(spans, *tokens.shape)
                with attending(self.model, SpanAttention(spans)):
                    output = decoder(input_ids=tokens, position_ids=positions.to(tokens.device), use_cache=False)
            hidden = output.last_hidden_state
            features = torch.cat([self._features[layer] for layer in layers], -1) if layers else None
        finally:
            for hook in hooks:
                hook.remove()
            self._features.clear()
        return TargetOutput(hidden, features)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]`` of hidden states ``[..., H]``, which must be those after the final norm."""
        if self._decoder is not None and hidden.dim() > 1 and hidden.shape[:-1].numel() <= FEW_ROWS:
            return self._decoder.head(hidden.flatten(0, -2)).view(*hidden.shape[:-1], self.vocab_size)
        return torch.nn.functional.linear(hidden, self.head)

    @torch.no_grad()
    def normalizer(self, hidden: Tensor, temperature: float = 1.0) -> Normalizer:
        """Return log Z and argmax over the whole vocabulary of hidden states ``[.., H]``, a few rows at a time."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        log_z = torch.empty(len(rows), dtype=dtype, device=rows.device)
        argmax = torch.empty(len(rows), dtype=torch.long, device=rows.device)
        num_rows = max(1, NORMALIZER_BYTES // (self.vocab_size * dtype.itemsize))
        for start in range(0, len(rows), num_rows):
            part = slice(start, start + num_rows)
            logits = self.logits(rows[part].to(self.dtype))
            log_z[part], argmax[part] = _normalize(logits, temperature, dtype)
        return Normalizer(log_z.view(hidden.shape[:-1]), argmax.view(hidden.shape[:-1]))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings ``[..., H]`` of token ids ``[...]``."""
        return torch.nn.functional.embedding(tokens, self.embedding)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of a conversation under the model's chat template, with thinking off."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise UnsupportedTargetError(f"{self.name} has no chat template; give token ids instead of messages")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, enable_thinking=False
            )
        except jinja2.TemplateError:
            raise  # the template's own word about these messages
        except Exception as error:  # a template is a program, and may fail in any way
            raise UnsupportedTargetError(f"{self.name}: its chat template fails: {first_line(error)}") from error
        return self.encode(str(text))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text as it stands; no special token is added."""
        if self.tokenizer is None:
            raise UnsupportedTargetError(f"{self.name} has no tokenizer")
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # whatever the tokenizer's layers raise
            raise UnsupportedTargetError(f"{self.name}: its tokenizer fails: {first_line(error)}") from error
        outside = next((token for token in ids if token >= self.embedding.shape[0]), None)
        if outside is not None:
            raise UnsupportedTargetError(
                f"{self.name}: its tokenizer gives the token {outside}, and its embedding has "
                f"{self.embedding.shape[0]} rows; the tokenizer is of another model"
            )
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if self.tokenizer is None:
            raise UnsupportedTargetError(f"{self.name} has no tokenizer")
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def save(self, folder: str | Path) -> None:
        """Write an ordinary Hugging Face folder, for engines that want one."""
        self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def _keep(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._features[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def _refuse_unfaithful(self) -> None:
        """Refuse a model whose logits are not head times hidden state: some families scale or cap them."""
        probe = torch.arange(4, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            expected = self.model(probe).logits
        ours = self.logits(self.forward(probe).hidden)
        if not torch.allclose(ours.float(), expected.float(), atol=1e-3, rtol=1e-2):
            raise UnsupportedTargetError(
                f"{self.name}: its logits are not its head times its last hidden state, "
                "so a drafter that shares the head cannot be trained for it"
            )


def choose_layers(name: str, num_layers: int, num_features: int) -> tuple[int, ...]:
    """Return DFlash's choice of K of T layers: ``round(1 + i (T - 4) / (K - 1))``, or ``T // 2`` for one."""
    if num_features == 1:
        return (num_layers // 2,)
    step = (num_layers - 4) / (num_features - 1)
    layers = tuple(round(1 + i * step) for i in range(num_features))
    if num_features < 1 or len(set(layers)) < num_features or layers[-1] > num_layers - 2:
        raise UnsupportedTargetError(f"{name}: {num_layers} layers are too few for {num_features} features")
    return layers


MASK_TOKENS = {"qwen3": 151_669}
"""Rows that a family's embedding has beyond its tokenizer, used as the mask token by published drafters."""


def find_mask_token(target: Target) -> int:
    """Return the mask token given, else the tokenizer's, else the family's; refuse one that cannot be one."""
    given = target._given_mask
    if given is None and target.tokenizer is not None:
        given = target.tokenizer.mask_token_id
    if given is None:
        given = MASK_TOKENS.get(target.config.model_type)
    if given is None:
        raise UnsupportedTargetError(
            f"{target.name}: no mask token is known for {target.config.model_type!r}; "
            "give mask_token_id, the id of a token that never occurs in text"
        )
    if not 0 <= given < target.embedding.shape[0]:
        raise UnsupportedTargetError(
            f"{target.name}: mask token {given} has no row in an embedding of {target.embedding.shape[0]}"
        )
    pad = None if target.tokenizer is None else target.tokenizer.pad_token_id
    if given in target.eos_ids or given == pad:
        raise UnsupportedTargetError(
            f"{target.name}: token {given} is the padding or end token; choose another mask token"
        )
    return given


def _refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    decoder = getattr(model, "model", None)
    if not all(hasattr(decoder, part) for part in ("layers", "norm")):
        raise UnsupportedTargetError(f"{name}: {type(model).__name__} has no decoder with `layers` and a final `norm`")
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedTargetError(
            f"{name}: layers of type {', '.join(sorted(kinds))} cannot be rolled back by length"
        )
    window = getattr(model.config, "sliding_window", None)
    if window is not None and not getattr(model.config, "layer_types", None):
        raise UnsupportedTargetError(f"{name}: attention within a window of {window} tokens is not supported")
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise UnsupportedTargetError(f"{name}: the output head must be a plain matrix without bias")


def _refuse_non_finite(model: PreTrainedModel, name: str) -> None:
    """Raise if weights hold NaN or infinity, which greedy choices would hide."""
    for which, tensor in model.named_parameters():
        if tensor.is_floating_point() and tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
            raise UnsupportedTargetError(f"{name}: {which} holds NaN or infinity; the weights are damaged")


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> frozenset[int]:
    ids: set[int] = set()
    for source in (model.config, getattr(model, "generation_config", None), tokenizer):
        eos = getattr(source, "eos_token_id", None)
        several = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
        wrong = [each for each in several if type(each) is not int or each < 0]
        if wrong:
            raise UnsupportedTargetError(f"{name}: eos_token_id is {wrong[0]!r}, which is not a token id")
        ids.update(several)
    return frozenset(ids)


def _context_length(config: Any, name: str) -> int | None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and (type(limit) is not int or limit < 2):
        raise UnsupportedTargetError(f"{name}: max_position_embeddings is {limit!r}, which is not a number of tokens")
    return limit


def _normalize(logits: Tensor, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log Z and argmax ``[R]`` of rows of logits ``[R, V]``."""
    num_rows = CPU_ROWS if logits.device.type == "cpu" else max(1, len(logits))
    width = -(-logits.shape[1] // RUN) * RUN
    work = torch.empty(min(num_rows, len(logits)), width, dtype=dtype, device=logits.device)
    found = []
    for some in logits.split(num_rows):
        x = work[: len(some)]
        x[:, : some.shape[1]] = some
        x[:, some.shape[1] :] = -torch.inf
        runs = x.view(len(x), -1, RUN)
        tops = runs.amax(-1)
        run = tops.argmax(-1, keepdim=True)  # much faster on a CPU than looking for it among all tokens
        inside = runs.gather(1, run[..., None].expand(-1, -1, RUN))[:, 0].argmax(-1)
        top = tops.gather(1, run)
        log_z = x.sub_(top).div_(temperature).exp_().sum(-1).log_().add_(top[:, 0] / temperature)
        found.append((log_z, run[:, 0] * RUN + inside))
    log_zs, argmaxes = zip(*found, strict=True)
    return torch.cat(log_zs), torch.cat(argmaxes)
