"""Options that commands share, as dataclasses; `grouped` makes Typer's flat parameters of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from typer import BadParameter, Option

from paceline.cli.console import note
from paceline.drafters import DRAFTERS
from paceline.errors import OptionError, require
from paceline.files import read_json
from paceline.policies import POLICIES
from paceline.registry import split_method

if TYPE_CHECKING:
    from paceline.api import LLM
    from paceline.targets import Target


#: How sampled drafts are verified.
Verifier = Literal["auto", "match", "rejection"]


def given_path(text: str) -> Path:
    """What options take for a path: Path would make the current folder of an empty text."""
    if not text:
        raise BadParameter("it is empty: name a file or folder")
    return Path(text)


#: What the drafters that read texts are built of.
Corpus = Annotated[
    list[Path],
    Option(
        "--corpus",
        "-c",
        parser=given_path,
        metavar="PATH",
        help="Text or JSONL file, .gz or not, or a folder of train data; may be repeated.",
    ),
]
TokenizerOf = Annotated[str, Option("--model", "-m", help="Whose tokenizer: named model, hub id or folder.")]


def new_file(text: str) -> Path:
    """The same for a file to be written: what it cannot be is said before there is something to write."""
    path = given_path(text)
    if path.is_dir():
        raise BadParameter(f"{text} is a folder: name a file")
    for above in path.parents:
        if above.is_file():
            raise BadParameter(f"{above} is a file, no folder")
    return path


def _option(group: str, *names: str, help: str, **more: Any) -> Any:
    return Option(*names, help=help, rich_help_panel=group, **more)


@dataclass(frozen=True)
class ModelChoice:
    """Which model, and on what."""

    model: Annotated[str, _option("Model", "--model", "-m", help="Named model, hub id, folder or GGUF file.")] = (
        "smollm2-135m"
    )
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64", "int8"] | None,
        _option(
            "Model",
            "--dtype",
            help="Default: float32 on the CPU, else the checkpoint's. int8: native tier, GGUF models only; less exact.",
        ),
    ] = None
    device: Annotated[str, _option("Model", "--device", help="As torch names it: cpu, cuda, cuda:1, …")] = "cpu"
    device_map: Annotated[
        str | None,
        _option("Model", "--device-map", metavar="MAP", help="As transformers takes it: auto, or JSON by module."),
    ] = None
    quantization: Annotated[
        str | None,
        _option("Model", "--quantization", metavar="NAME", help="bnb-8bit, bnb-4bit, quanto-int8, …, or JSON."),
    ] = None
    attn_implementation: Annotated[
        Literal["sdpa", "eager"] | None,
        _option("Model", "--attn-implementation", help="Of Hugging Face's modules."),
    ] = None
    adapter: Annotated[
        str | None,
        _option("Model", "--adapter", metavar="PATH", help="Folder or hub id of a LoRA adapter, to be merged."),
    ] = None
    exact: Annotated[
        bool | None,
        _option(
            "Model",
            "--exact/--no-exact",
            show_default=False,
            help="Insist on output that is plain decoding's bit for bit, or take torch's own attention in the torch "
            "tier. Default: exact where the tier can be: on the CPU, in float32 (the native tier: in bfloat16 too).",
        ),
    ] = None

    def target(self, tier: str = "auto") -> Target:
        from paceline.targets import load_target

        return load_target(self.model, tier=tier, exact=self.exact, **self._placement())

    def _placement(self) -> dict[str, Any]:
        import torch

        asked = {
            "device_map": self.device_map,
            "quantization_config": self.quantization,
            "attn_implementation": self.attn_implementation,
            "adapter": self.adapter,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        return {"dtype": getattr(torch, self.dtype) if self.dtype else None, "device": self.device, **given}


@dataclass(frozen=True)
class ModelOptions(ModelChoice):
    """Which model, and how it runs."""

    tier: Annotated[
        str,
        _option("Model", "--tier", help="auto (the fastest that runs the model), native, torch or reference."),
    ] = "auto"
    fresh: Annotated[bool, _option("Model", "--fresh", help="Leave out what paceline tune learned.")] = False

    def llm(self, method: MethodOptions) -> LLM:
        from paceline.api import load

        placed = self._placement()
        llm = load(self.model, tier=self.tier, exact=self.exact, fresh=self.fresh, **placed, **asdict(method))
        if llm.tuned:
            note(f"tuned on {llm.tuned.prompts} prompts, {llm.tuned.measured}; --fresh does without")
        return llm


@dataclass(frozen=True)
class MethodOptions:
    """How it is sped up."""

    drafter: Annotated[
        str, _option("Method", "--drafter", "-d", help="NAME[:OPTION=VALUE]…, with +POLICY if you like.")
    ] = "auto"
    policy: Annotated[
        str | None,
        _option("Method", "--policy", "-p", help="NAME[:OPTION=VALUE]…; default the drafter's own."),
    ] = None
    verifier: Annotated[
        Verifier,
        _option("Method", "--verifier", help="How sampled drafts are verified."),
    ] = "auto"

    def __post_init__(self) -> None:
        """Raises OptionError for unknown names; their options wait, as looking at those imports torch."""
        drafter, policy = self.parts()
        for registry, text in ((DRAFTERS, drafter), (POLICIES, policy)):
            if text is not None and (name := text.partition(":")[0]) not in registry:
                registry.get(name)

    def parts(self) -> tuple[str, str | None]:
        """Drafter and policy as written, whichever option the policy came by."""
        drafter, own = split_method(self.drafter, POLICIES.__contains__)
        require(own is None or self.policy is None, f"the policy is given twice, as {own} and as {self.policy}")
        return drafter, own if self.policy is None else self.policy

    def label(self, llm: LLM) -> str:
        """The method in full: `drafter+policy`."""
        return f"{self.parts()[0]}+{llm.policy.text}"


@dataclass(frozen=True)
class Sampling:
    """Fields of `paceline.SamplingParams`."""

    max_new_tokens: Annotated[
        int, _option("Sampling", "--max-new-tokens", "-n", min=1, help="Most tokens to generate.")
    ] = 128
    min_new_tokens: Annotated[
        int, _option("Sampling", "--min-new-tokens", min=0, help="Fewest tokens to generate.")
    ] = 0
    temperature: Annotated[float, _option("Sampling", "--temperature", "-t", min=0.0, help="0 is greedy decoding.")] = (
        0.0
    )
    top_k: Annotated[int, _option("Sampling", "--top-k", min=0, help="0: off.")] = 0
    top_p: Annotated[float, _option("Sampling", "--top-p", help="1: off.")] = 1.0
    min_p: Annotated[float, _option("Sampling", "--min-p", help="0: off.")] = 0.0
    repetition_penalty: Annotated[float, _option("Sampling", "--repetition-penalty", help="1: off.")] = 1.0
    no_repeat_ngram_size: Annotated[int, _option("Sampling", "--no-repeat-ngram-size", min=0, help="0: off.")] = 0
    stop: Annotated[
        list[str] | None,
        _option("Sampling", "--stop", metavar="TEXT", help="End before this string; may be given again."),
    ] = None
    seed: Annotated[
        int | None, _option("Sampling", "--seed", min=0, max=2**32 - 1, help="Makes sampling repeatable.")
    ] = None
    json_schema: Annotated[
        Path | None,
        _option(
            "Sampling",
            "--json-schema",
            parser=given_path,
            metavar="FILE",
            help="The output is JSON that fits this schema.",
        ),
    ] = None
    grammar: Annotated[
        Path | None,
        _option(
            "Sampling", "--grammar", parser=given_path, metavar="FILE", help="The output matches this Lark grammar."
        ),
    ] = None

    def checked(self) -> dict[str, Any]:
        """Keyword arguments for `LLM.requests`. Raises OptionError for what is wrong, before a model is loaded."""
        from paceline.decoding.sampling import SamplingParams

        values = asdict(self) | {"stop": tuple(self.stop or ())}
        if self.json_schema:
            try:
                values["json_schema"] = schema = read_json(_text(self.json_schema))
            except ValueError as error:
                raise OptionError(f"{self.json_schema}, which the output must match, is not JSON ({error})") from error
            require(isinstance(schema, dict), f"{self.json_schema} is no JSON schema: it must be an object")
        if self.grammar:
            values["grammar"] = _text(self.grammar)
        SamplingParams(**values)
        return values


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise OptionError(f"cannot read what the output must match: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}, which the output must match, is not UTF-8 text (byte {error.start})") from error


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of a dataclass's type become one option for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flattened: dict[str, tuple[Any, Any]] = {}  # annotation and default by option
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            flattened |= {field.name: (types[field.name], _default(field)) for field in fields(groups[name])}
        else:
            flattened[name] = hints[name], parameter.default

    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {name: annotation for name, (annotation, _) in flattened.items()}
    flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # as inspect.signature reads it
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for name, (annotation, default) in flattened.items()
        ]
    )
    return flat


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
