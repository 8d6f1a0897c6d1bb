"""Names, options and method strings; plug-ins of other packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import pytest

from paceline import registry
from paceline.cli.methods import describe
from paceline.drafters import DRAFTERS
from paceline.drafters.none import NoDrafter
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.drafting.base import Drafter
from paceline.errors import OptionError, PacelineError, require
from paceline.policies import POLICIES
from paceline.policies.base import StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.registry import Registry, Spec, split_method

if TYPE_CHECKING:
    from nowhere import Unknown


class Options:
    """One option of each kind."""

    def __init__(
        self,
        positional: Unknown = None,
        *,
        whole: int = 1,
        real: float = 0.5,
        flag: bool = False,
        text: str = "",
        maybe: int | None = None,
        either: float | str = 0.0,
    ) -> None:
        self.values = (whole, real, flag, text, maybe, either)


@pytest.fixture
def things() -> Registry:
    made = Registry("thing", "paceline.things", {})
    made.add("options", f"{__name__}:Options")
    return made


def test_conversion(things: Registry) -> None:
    spec = things.parse("options:whole=-3:real=1e-2:flag=true:text=a/b+c d:maybe=4:either=x")
    assert spec.options == {"whole": -3, "real": 0.01, "flag": True, "text": "a/b+c d", "maybe": 4, "either": "x"}
    assert spec.build().values == (-3, 0.01, True, "a/b+c d", 4, "x")
    assert things.parse("options:maybe=none:either=0.5:flag=0").options == {"maybe": None, "either": 0.5, "flag": False}
    assert things.parse("options").options == {}
    assert things.parse("options").build().values == (1, 0.5, False, "", None, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("options:whole=1.5", "option 'whole' of thing 'options' must be int, not '1.5'"),
        ("options:whole=", "must be int, not ''"),
        ("options:real=fast", "must be float, not 'fast'"),
        ("options:flag=maybe", "must be bool, not 'maybe'"),
        ("options:maybe=x", "must be int, not 'x'"),
        ("options:size=1", "thing 'options' has no option 'size'; its options are whole, real, flag, text"),
        ("options:positional=1", "has no option"),
        ("options:whole", "option 'whole' of thing 'options' needs a value, as in whole="),
        ("options:", "has no option ''"),
        ("option", "unknown thing 'option'; did you mean 'options'?"),
        ("xyz", "unknown thing 'xyz'; there are options"),
        ("", "unknown thing ''"),
    ],
)
def test_errors(things: Registry, text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        things.parse(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_dashes_in_options() -> None:
    assert POLICIES.parse("adaedl:k-max=3").options == POLICIES.parse("adaedl:k_max=3").options == {"k_max": 3}


def test_options_are_the_keyword_arguments() -> None:
    assert set(DRAFTERS.options("prompt-lookup")) == {"ngram", "shortest", "branches", "budget"}
    assert DRAFTERS.options("none") == {}
    with pytest.raises(OptionError, match="it takes none"):
        DRAFTERS.parse("none:k=1")


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_every_drafter(name: str) -> None:
    cls = DRAFTERS.get(name)
    assert issubclass(cls, Drafter)
    assert isinstance(POLICIES.parse(cls.default_policy).build(), StoppingPolicy)
    for option in DRAFTERS.options(name).values():
        kinds = {*(get_args(option.annotation) or (option.annotation,))}
        assert kinds <= {int, float, bool, str, type(None)}, f"{option}: a user cannot write it"


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy(name: str) -> None:
    assert isinstance(POLICIES.parse(name).build(), StoppingPolicy)
    assert POLICIES.get(name).__doc__


class TestMethods:
    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("none", ("none", None)),
            ("prompt-lookup+fixed", ("prompt-lookup", "fixed")),
            ("eagle:k=2+adaedl:gamma=0.2", ("eagle:k=2", "adaedl:gamma=0.2")),
            ("draft-model:model=a/b+c", ("draft-model:model=a/b+c", None)),
            ("draft-model:model=a+b+fixed:k=3", ("draft-model:model=a+b", "fixed:k=3")),
            ("none+fixd", ("none", "fixd")),
            ("layer-skip:skip=auto+specdec++:k_max=3", ("layer-skip:skip=auto", "specdec++:k_max=3")),
            ("none+specdec++", ("none", "specdec++")),
        ],
    )
    def test_split(self, text: str, parts: tuple[str, str | None]) -> None:
        assert split_method(text, POLICIES.__contains__) == parts


@dataclass
class EntryPoint:
    name: str
    made: object

    def load(self) -> object:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


class TestPlugins:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        points = {
            "paceline.policies": [EntryPoint("always-one", AlwaysOne), EntryPoint("fixed", AlwaysOne)],
            "paceline.drafters": [EntryPoint("broken", ImportError("no module x\nreally")), EntryPoint("fine", Fine)],
        }

        def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
            return [point for point in points.get(group, []) if name in (None, point.name)]

        monkeypatch.setattr(registry, "entry_points", entry_points)

    def test_are_found_by_name(self) -> None:
        assert "always-one" in POLICIES
        assert list(POLICIES)[-1] == "always-one"
        assert POLICIES.parse("always-one:really=true").build().really
        assert split_method("none+always-one", POLICIES.__contains__) == ("none", "always-one")

    def test_do_not_replace_our_own(self) -> None:
        assert POLICIES.get("fixed") is Fixed
        assert list(POLICIES).count("fixed") == 1

    def test_have_checked_options(self) -> None:
        with pytest.raises(OptionError, match="its options are really"):
            POLICIES.parse("always-one:k=1")

    def test_that_cannot_be_loaded_are_named(self) -> None:
        with pytest.raises(OptionError) as raised:
            DRAFTERS.parse("broken:k=1")
        assert str(raised.value) == (
            "the drafter 'broken' of another package cannot be loaded: ImportError: no module x"
        )

    def test_that_cannot_be_loaded_are_not_listed(self, caplog: pytest.LogCaptureFixture) -> None:
        assert {*DRAFTERS} - {entry["name"] for entry in describe(DRAFTERS)} == {"broken"}
        assert "'broken' of another package cannot be loaded" in caplog.text

    def test_of_the_other_kind_are_unknown(self) -> None:
        with pytest.raises(OptionError, match="unknown drafter"):
            DRAFTERS.parse("always-one")


class Fine(NoDrafter):
    """Drafts nothing."""


class AlwaysOne(StoppingPolicy):
    limit = 1

    def __init__(self, *, really: bool = False) -> None:
        self.really = really


def test_add_is_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DRAFTERS, "_where", dict(DRAFTERS._where))
    DRAFTERS.add("mine", "paceline.drafters.prompt_lookup:PromptLookup")
    assert "mine" in DRAFTERS
    assert DRAFTERS.parse("mine:ngram=4") == Spec("mine:ngram=4", PromptLookup, {"ngram": 4})


def test_require() -> None:
    require(True, "fine")
    with pytest.raises(PacelineError, match="not fine"):
        require(False, "not fine")
