"""The prompts: conversations by task, from files or from the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.bench.rows import RawRow, read_rows
from paceline.drafting.corpus.texts import is_whole
from paceline.errors import require

OVERALL = "overall"  # the results' row over all tasks


@dataclass(frozen=True)
class Prompt:
    """A conversation; `turns` are the user's messages."""

    id: str
    task: str
    turns: tuple[str, ...]


def load_suite(source: str, tasks: Sequence[str] = (), limit: int | None = None, turns: int = 1) -> list[Prompt]:
    """The prompts of a suite, task by task in the order of first appearance.

    Args:
        source: a JSONL (`.gz` too) or parquet file of `{"id", "task", "turns": [...]}` rows, or with the prompt in
            another column (`columns.prompt_column`), which `FILE:column=NAME` names; a folder of such JSONL files; a
            `datasets` id, `name[:config=...][:split=...][:column=...]`; or `speed-bench[:config=...][:path=...]`
            (`speed_bench.locate`). A row's `group` is its task when it has one (Spec-Bench folds MT-Bench's eight
            categories into `mt_bench`), else its `task`, else its `category`, else the file's name.
        limit: first prompts of each task.
        turns: most turns of a conversation.

    Raises:
        OptionError: naming file and line, when a row cannot be read; for an empty suite; for unknown tasks.
    """
    require(bool(source.strip()), "name a suite: the prompts' file, folder or data set")
    found: dict[str, list[Prompt]] = {}
    seen: dict[str, str] = {}
    for raw in read_rows(source):
        prompt = _prompt(raw, turns)
        require(prompt.id not in seen, f"{raw.where}: id {prompt.id!r} was there before, at {seen.get(prompt.id)}")
        seen[prompt.id] = raw.where
        found.setdefault(prompt.task, []).append(prompt)
    require(bool(found), f"{source} has no prompts")
    unknown = [task for task in tasks if task not in found]
    require(not unknown, f"{source} has no task {', '.join(unknown)}; its tasks are {', '.join(found)}")
    return [prompt for task, prompts in found.items() if not tasks or task in tasks for prompt in prompts[:limit]]


def _prompt(raw: RawRow, most_turns: int) -> Prompt:
    row, where = raw.row, raw.where
    require(isinstance(row, dict), f"{where}: not a JSON object")
    turns = row.get("turns")
    require(
        isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) and turn.strip() for turn in turns),
        f"{where}: 'turns' must be a list of texts, none of them empty (or 'prompt' such a text)",
    )
    category = row.get("category")  # a number, as some data sets have it, names nothing
    task = row.get("group") or row.get("task") or (category if isinstance(category, str) and category else raw.task)
    require(isinstance(task, str), f"{where}: 'task' must be a text")
    require(task != OVERALL, f"{where}: a task must not be called '{OVERALL}', the results' name for all of them")
    known = str(next((row[key] for key in ("id", "question_id") if row.get(key) is not None), raw.id))
    for name, text in (("id", known), ("task", task), *(("turns", turn) for turn in turns)):
        require(is_whole(text), f"{where}: '{name}' has half a character (a lone surrogate, such as \\ud83d)")
    return Prompt(known, task, tuple(turns[:most_turns]))


def batches(prompts: Iterable[Prompt], size: int) -> list[list[Prompt]]:
    """Groups of at most `size`, each of one task and one number of turns; together in the order of the prompts."""
    groups: list[list[Prompt]] = []
    open_groups: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        kind = (prompt.task, len(prompt.turns))
        if kind not in open_groups or len(open_groups[kind]) == size:
            open_groups[kind] = []
            groups.append(open_groups[kind])
        open_groups[kind].append(prompt)
    return groups
