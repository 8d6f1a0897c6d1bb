"""Exceptions for everything a user can cause. Each message is one line that says what to do."""


class PacelineError(Exception):
    """Base of all errors raised on purpose; the command line prints its message and nothing else."""


class ModelError(PacelineError):
    """A model could not be found, fetched or loaded."""


class UnknownModel(ModelError):
    """The name is neither a named model, a local folder or file, nor a model on the hub."""


class DownloadError(ModelError):
    """A model could not be fetched: no network, or the server refused."""


class IntegrityError(ModelError):
    """A download has the wrong hash, or a cached model is damaged."""


class DiskFull(ModelError):
    """There is not enough room on the disk for the model."""


class UnsupportedModel(ModelError):
    """The model exists but cannot be used, for example because it is not a causal language model."""


class ModifiedModel(UnsupportedModel):
    """The model's modules do more than multiply by their weights, which the fast tiers would leave out."""


class TokenizerMismatch(ModelError):
    """Two models that must share a tokenizer do not."""


class ContextOverflow(PacelineError):
    """Prompt and requested tokens do not fit into the model's context."""


class OptionError(PacelineError):
    """A drafter, policy or other option is unknown or has an invalid value."""


class NativeUnavailable(PacelineError):
    """The native tier cannot be built or used here; the torch tier can."""


class CorpusError(PacelineError):
    """A text corpus is missing, empty, not readable as text, or malformed."""


class CheckpointError(PacelineError):
    """A trained part is missing, damaged or incomplete."""


class CheckpointMismatch(CheckpointError):
    """A trained part was made for another model."""


class DataError(PacelineError):
    """Training data is missing, damaged, or of another make than what is asked for."""


class TrainingError(PacelineError):
    """Training cannot go on: the loss is not a number."""


class EndpointError(PacelineError):
    """A server does not answer, refuses a request, or sends what is none of the OpenAI API's."""


def require(condition: bool, message: str) -> None:
    """Raise OptionError(message) unless the condition holds; for options and other arguments."""
    if not condition:
        raise OptionError(message)


def check_text(text: str, what: str = "prompt") -> str:
    """The text. Raises OptionError for one with surrogates, which no tokenizer takes: Python hides bytes of the command
    line in them that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"the {what} is not valid UTF-8") from error
    return text


def first_line(error: object) -> str:
    """The first line of an error, or of its text, with the second where it only leads to that; its type where it has
    none.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
