from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.exactness import Difference
from paceline.bench.journal import Run
from paceline.bench.latency import Latency
from paceline.bench.metrics import ResultRow, Totals, acceptance_length, n_alpha, predicted_speedup, results


def call(method: str, task: str, tokens: int, seconds: float, **facts: Any) -> Run:
    fields = {"temperature": 0.0, "ids": ["p"], "turn": 0, "prompt_tokens": [3]} | facts
    return Run(method=method, task=task, outputs=[[0] * tokens], seconds=seconds, **fields)


def split(draft: float, verify: float, seconds: float) -> dict[str, float]:
    return {"draft": draft, "verify": verify, "sample": 0.0, "other": seconds - draft - verify}


AR = [
    call("ar", task, 4, 8.0, passes=4, rounds=[[(0, 0, 0, 1)] * 4], split=split(0.0, 6.0, 8.0)) for task in ("a", "b")
]
HF = [call("hf", task, 4, 16.0, passes=4) for task in ("a", "b")]
DRAFTING = [
    call("d", "a", 4, 2.0, passes=1, rounds=[[(4, 4, 3, 4)]], split=split(0.5, 1.0, 2.0)),
    call("d", "b", 4, 6.0, passes=3, rounds=[[(2, 2, 0, 1), (2, 2, 1, 2), (0, 0, 0, 1)]], split=split(0.5, 3.0, 6.0)),
]


def rows(methods: tuple[str, ...], differences: list[Difference] | None = None) -> dict[tuple[str, str], ResultRow]:
    runs = [run for run in AR + HF + DRAFTING if run.method in methods]
    return {(r["method"], r["task"]): r for r in results(runs, differences or [], methods, batch=1)}


def test_every_metric_by_hand() -> None:
    row = rows(("ar", "hf", "d"))["d", "overall"]
    assert row["prompts"] == 2
    assert row["tokens"] == 8
    assert row["tokens_per_s"] == pytest.approx(1.0)
    assert row["speedup_ar"] == pytest.approx(2.0)
    assert row["speedup_hf"] == pytest.approx(4.0)
    assert row["tau"] == pytest.approx(2.0)
    assert row["v_d"] == pytest.approx(4 / 8)
    assert row["r_d"] == pytest.approx(4 / 8)
    assert row["hm"] == pytest.approx(50.0)
    assert row["n_alpha"] == [2 / 3, 1 / 2, 1.0, 0.0, None]
    assert row["split"] == pytest.approx({"draft": 1.0, "verify": 4.0, "sample": 0.0, "other": 3.0})
    # alpha = (1 s / 8 drafted) / (12 s / 8 passes of ar) = 1/12
    assert row["predicted_speedup"] == pytest.approx(0.5 / ((1 / 12 - 0.5) * 0.5 + 0.5))


def test_rows_by_task() -> None:
    table = rows(("ar", "hf", "d"))
    assert [key[1] for key in table if key[0] == "d"] == ["overall", "a", "b"]
    assert table["d", "a"]["speedup_ar"] == pytest.approx(4.0)
    assert table["d", "b"]["speedup_ar"] == pytest.approx(8 / 6)


def test_what_does_not_apply_is_null() -> None:
    table = rows(("ar", "hf", "d"))
    for key in ("v_d", "r_d", "hm", "n_alpha", "split", "predicted_speedup"):
        assert table["hf", "overall"][key] is None, key  # type: ignore[literal-required]
    assert table["hf", "overall"]["tau"] == 1.0
    for key in ("v_d", "hm", "n_alpha", "predicted_speedup"):
        assert table["ar", "overall"][key] is None, key  # type: ignore[literal-required]
    alone = rows(("d",))["d", "overall"]
    for key in ("speedup_ar", "speedup_hf", "identical", "tie", "wrong", "predicted_speedup"):
        assert alone[key] is None, key  # type: ignore[literal-required]


def test_verdicts_are_counted_by_task() -> None:
    shared = {"temperature": 0, "id": "p", "turn": 0, "position": 1, "tokens": [1, 2], "gap": 0.1, "allowed": 0.2}
    differences = [Difference(method="d", task="a", verdict="tie", **shared)]  # type: ignore[typeddict-item]
    differences += [Difference(method="d", task="b", verdict="wrong", **shared)]  # type: ignore[typeddict-item]
    table = rows(("ar", "d"), differences)
    verdicts = {key: (row["identical"], row["tie"], row["wrong"]) for key, row in table.items()}
    assert verdicts["d", "overall"] == (0, 1, 1)
    assert verdicts["d", "a"] == (0, 1, 0)
    assert verdicts["d", "b"] == (0, 0, 1)
    assert verdicts["ar", "overall"] == (2, 0, 0)


def test_sampled_output_has_no_verdict() -> None:
    runs = [call("ar", "a", 4, 1.0, temperature=0.7), call("ar", "a", 4, 1.0)]
    sampled, greedy = (r for r in results(runs, [], ["ar"], batch=1) if r["task"] == "overall")
    assert sampled["identical"] is None
    assert greedy["identical"] == 1


def test_verdicts_are_counted_by_temperature() -> None:
    runs = [call(name, "a", 4, 1.0, temperature=t) for t in (0.0, 0.7) for name in ("ar", "d")]
    wrong = Difference(
        method="d", task="a", temperature=0.7, id="p", turn=0, position=1, tokens=[1, 2], gap=0.1, allowed=0.0,
        verdict="wrong",
    )  # fmt: skip
    found = results(runs, [wrong], ["ar", "d"], 1, lambda method, temperature: temperature == 0 or method == "d")
    table = {(row["method"], row["temperature"]): row["wrong"] for row in found if row["task"] == "overall"}
    assert table == {("ar", 0.0): 0, ("d", 0.0): 0, ("ar", 0.7): None, ("d", 0.7): 1}


def test_n_alpha_only_for_chains() -> None:
    assert n_alpha([(4, 4, 4, 5), (3, 2, 1, 2)]) is None
    assert n_alpha([(0, 0, 0, 1)]) is None


def test_n_alpha_does_not_count_what_a_stop_cut_off() -> None:
    # five drafted, the end of sequence was the second of them: the third is neither accepted nor rejected
    assert n_alpha([(5, 5, 2, 2)]) == [1.0, 1.0, None, None, None]
    assert n_alpha([(5, 5, 2, 3)]) == [1.0, 1.0, 0.0, None, None]


@given(
    drafted=st.integers(1, 200),
    accepted_share=st.floats(0.01, 1),
    tokens=st.integers(1, 400),
    draft_seconds=st.floats(0, 100),
    verify_seconds=st.floats(0.01, 100),
)
def test_prediction_is_equation_14(
    drafted: int, accepted_share: float, tokens: int, draft_seconds: float, verify_seconds: float
) -> None:
    accepted = max(1, int(accepted_share * min(drafted, tokens)))
    own = Totals(tokens=tokens, seconds=1.0, split=split(draft_seconds, 0, 1), counts=(drafted, accepted))
    ar = Totals(tokens=10, passes=10, seconds=1.0, split=split(0, verify_seconds, 1))
    alpha = draft_seconds / drafted / (verify_seconds / 10)
    v_d, r_d = accepted / drafted, accepted / tokens
    denominator = (alpha - v_d) * r_d + v_d
    if denominator > 1e-9:
        assert predicted_speedup(own, ar) == pytest.approx(v_d / denominator, rel=1e-6)


def test_decoding_alone() -> None:
    """By the tokens behind a prompt's first ones; a prompt that has no others counts for the first alone."""
    runs = [
        call("ar", "a", 4, 8.0, latencies=[Latency(5.0, 3.0, 3)]),
        call("ar", "b", 5, 8.0, latencies=[[4.0, 4.0, 4]]),  # as it is read
        call("d", "a", 4, 6.0, latencies=[Latency(5.0, 1.0, 2)]),
        call("d", "b", 4, 6.0, latencies=[Latency(6.0, 0.0, 0)]),
        call("old", "a", 4, 6.0, latencies=[Latency(5.0, 1.0, 2)]),
        call("old", "b", 4, 6.0),
    ]
    found = {row["method"]: row for row in results(runs, [], ("ar", "d", "old"), 1) if row["task"] == "overall"}
    keys = ("ttft_s", "tpot_ms", "decode_speedup_ar")
    assert [found["ar"][key] for key in keys] == [4.5, 1000.0, 1.0]  # type: ignore[literal-required]
    assert [found["d"][key] for key in keys] == [5.5, 500.0, 2.0]  # type: ignore[literal-required]
    assert [found["old"][key] for key in keys] == [None, None, None]  # type: ignore[literal-required]
    assert results(runs[3:4], [], ("d",), 1)[0]["tpot_ms"] is None


def test_acceptance_length_is_a_mean_over_prompts() -> None:
    """A conversation's turns count as one prompt; of a batch each row has passes of its own."""
    one = (0, 0, 0, 1)
    runs = [
        call("d", "a", 6, 1.0, passes=2, rounds=[[(2, 2, 2, 3), (2, 2, 2, 3)]], ids=["x"]),  # 7 tokens in 3 passes
        call("d", "a", 1, 1.0, passes=1, rounds=[[one]], ids=["x"], turn=1),
        Run(
            method="d", task="b", temperature=0.0, ids=["y", "z"], turn=0, prompt_tokens=[1, 1], seconds=1.0, passes=6,
            outputs=[[0] * 4, [0] * 2], rounds=[[one] * 4, [(1, 1, 1, 2)]],
        ),
    ]  # fmt: skip
    assert acceptance_length(runs) == pytest.approx((7 / 3 + 1 + 2) / 3)
    table = {row["task"]: row for row in results(runs, [], ("d",), 1)}
    assert table["a"]["acceptance_length"] == pytest.approx(7 / 3)
    assert table["b"]["acceptance_length"] == pytest.approx(1.5)
    assert table["overall"]["tau"] == pytest.approx(13 / 9)  # where long outputs weigh more


def test_acceptance_length_of_other_decoders() -> None:
    assert acceptance_length([call("hf", "a", 4, 1.0, passes=2)]) == 2.0
    assert acceptance_length([call("hf", "a", 4, 1.0)]) is None
    both = Run(
        method="hf", task="a", temperature=0.0, ids=["y", "z"], turn=0, prompt_tokens=[1, 1], seconds=1.0, passes=6,
        outputs=[[0] * 4, [0] * 2],
    )  # fmt: skip
    assert acceptance_length([both]) is None
    assert acceptance_length([]) is None
