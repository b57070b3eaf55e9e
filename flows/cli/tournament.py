"""`sluice tournament`: what it prints, and its page."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean

from rich.console import Console
from rich.text import Text

from flows.cli.replay import parse_steps
from flows.cli.run import run_to_end
from flows.cli.terminal import plain_table, with_width
from flows.lifecycle.session import prefect_session
from flows.preflight import check, check_checkpoint
from flows.replay.fork import make_fork
from flows.replay.replay import OWN, StepFigures
from flows.report.charts import Line, line_chart
from flows.report.page import Chart, Panel, Table, write_page
from flows.tournament import (
    Method,
    Round,
    Standing,
    Tournament,
    add_figures,
    file_name,
    final_order,
    hold_tournament,
    method_configs,
    open_tournament,
    parse_methods,
    plan_forks,
)
from infra.storage import places
from infra.storage.driver_lock import file_lock
from infra.storage.runs import RunDirectory
from schemas.config.load import differences
from schemas.errors import UserError

FIGURES = ("method", "cosine", "norm", "times own", "sample size", "clipped", "loss", "gradient", "moves most")
RANKING = ("place", "method", "run", "steps", "accuracy", "reward", "")
STEP = ("step", "cosine", "norm", "times own", "sample size", "clipped", "loss", "gradient")
SHIFTS = ("step", "row", "token", "text", "moved by the run", "by the method")
MEANINGS = (
    "Means over the steps, each from the weights that the run had before it. cosine: of the change of the weights with "
    "the run's own; norm: its length. sample size: effective sample size of the step's tokens under the weights after "
    "it, as a fraction. clipped, loss and gradient: clip_fraction, loss and grad_norm of the update. None of them says "
    "which method is better: the forks do."
)


def run_tournament(
    console: Console,
    directory: RunDirectory,
    texts: Sequence[str],
    *,
    name: str,
    steps: str | None,
    at: int | None,
    fork_steps: int | None,
    forks: bool,
    as_json: bool,
) -> None:
    """Compare methods on stored steps and by forks, print what is found, and write the page; or go on with that.

    Raises:
        UserError: A method, a step or a fork can't be had; nothing was computed.
        PipelineError: What a stage raises, or a fork.
    """
    methods = parse_methods(texts)
    begin = partial(open_tournament, directory, name, methods, parse_steps(steps) if steps else None, at, fork_steps)
    begin()  # what is refused here leaves no file
    method_configs(directory, methods)
    with _alone(directory, name):
        _run_tournament(console, directory, begin(), [method.name for method in methods], forks=forks, as_json=as_json)


def _run_tournament(
    console: Console, directory: RunDirectory, known: Tournament, names: Sequence[str], *, forks: bool, as_json: bool
) -> None:
    told = Console(stderr=True) if as_json else console
    planned = plan_forks(directory, known, names) if forks else []
    with told.status("checking model, data and reward"):
        for fork in planned:
            check(fork.config)
            check_checkpoint(directory, fork.config)
    with told.status("comparing methods on stored steps"):
        known = add_figures(directory, known, names)
    page = _write_page(directory, known, names, ())
    rounds: tuple[Round, ...] = ()
    if not as_json:
        title = f"steps {known.first} to {known.stop - 1} of run {directory.run_id}, each from the run's own weights"
        _print_table(console, title, FIGURES, _figure_rows(known, names), left=1)
    if forks:
        with told.status("forking"):
            for fork in planned:
                make_fork(fork)
        services = directory.config().services
        with prefect_session(services, told):
            rounds = run_to_end(
                lambda: hold_tournament(directory.run_id, directory.runs_dir, known.name, tuple(names)),
                services,
                lambda error, _: (
                    None if isinstance(error, UserError) else "the same command goes on with the tournament"
                ),
            )
        known = open_tournament(directory, known.name, ())  # with what the flow has found
        page = _write_page(directory, known, names, rounds)
    if as_json:
        found = {"steps": [known.first, known.stop], "at": known.at, "page": page}
        found |= {"methods": [known.methods[each].model_dump() for each in names]}
        print(json.dumps({**found, "rounds": [each.model_dump() for each in rounds]}))
        return
    if rounds:
        _print_table(console, _criterion(rounds), RANKING, _ranking_rows(rounds), left=3)
        console.print(f"{_best(rounds)} of {len(names)}", highlight=False)
    console.print(f"wrote {page}", soft_wrap=True, highlight=False)


@contextmanager
def _alone(directory: RunDirectory, name: str) -> Iterator[None]:
    """Hold a tournament's lock during the block; in a bucket there is none."""
    if not directory.is_local:
        yield
        return
    advice = "wait for its end, or end that process first; --name begins another tournament"
    with file_lock(directory.path / f"{file_name(name)}.lock", f"tournament {name} of run {directory.run_id}", advice):
        yield


def _print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
    """Print a table whose first `left` columns and last one are texts."""
    table = plain_table(*header[:-1], left=left, title=title)
    table.add_column(header[-1], overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    with_width(console).print(table)


def _criterion(rounds: Sequence[Round]) -> str:
    is_evaluated = any(standing.accuracy is not None for each in rounds for standing in each.standings)
    reward = "mean reward of a fork's last steps"
    return f"ranked by held-out accuracy, then {reward}" if is_evaluated else f"ranked by {reward}: no held-out data"


def _figure_rows(known: Tournament, names: Sequence[str]) -> list[tuple[str, ...]]:
    return [(name, *_mean_figures(known.methods[name].figures), _most_moved(known.methods[name])) for name in names]


def _mean_figures(figures: Sequence[StepFigures]) -> tuple[str, ...]:
    """Return means over steps as texts, in the order of `STEP` after its first."""
    updates = [each.update for each in figures if each.update is not None]
    columns: list[list[float | None]] = [
        [update.cosine for update in updates],
        [update.norm_b for update in updates],
        [update.norm_ratio for update in updates],
        [each.ess for each in figures],
        *([each.metrics.get(name) for each in figures] for name in ("clip_fraction", "loss", "grad_norm")),
    ]
    found = ([value for value in column if value is not None] for column in columns)
    return tuple(f"{fmean(column):.4g}" if column else "-" for column in found)


def _most_moved(method: Method) -> str:
    if failure := next((each.failure for each in method.figures if each.failure), ""):
        return failure
    shifts = [shift for each in method.figures for shift in each.shifts]
    most = max(shifts, key=lambda shift: abs(shift.b), default=None)
    return "-" if most is None else f"{most.text!r} {most.b:+.4f}"


def _best(rounds: Sequence[Round]) -> str:
    """Say which method is best; of those that are equal, none is."""
    best, *others = rounds[-1].standings
    equal = [each.method for each in others if (each.accuracy, each.reward) == (best.accuracy, best.reward)]
    return f"{', '.join([best.method, *equal])} are equal, and best" if equal else f"{best.method} is best"


def _ranking_rows(rounds: Sequence[Round]) -> list[tuple[str, ...]]:
    last = {standing.method: each.stop for each in rounds for standing in each.standings}
    return [_ranking_row(place, each, last[each.method]) for place, each in enumerate(final_order(rounds), 1)]


def _ranking_row(place: int, standing: Standing, stop: int) -> tuple[str, ...]:
    scores = ("-" if value is None else f"{value:.3f}" for value in (standing.accuracy, standing.reward))
    return (str(place), standing.method, standing.run_id, str(stop), *scores, standing.failure)


def _write_page(directory: RunDirectory, known: Tournament, names: Sequence[str], rounds: Sequence[Round]) -> str:
    place = places.join(directory.url, f"{file_name(known.name)}.html")
    verdict = f"{len(names)} methods compared on steps {known.first} to {known.stop - 1}; no forks yet"
    if rounds:
        verdict = f"{_best(rounds)} of {len(names)}, {_criterion(rounds)}"
    failures = [f"{name}: {known.methods[name].failure}" for name in names if known.methods[name].failure]
    panels = [_ranking_panel(known, rounds)] if rounds else []
    panels += [_figures_panel(known, names), _tokens_panel(known, names)]
    panels += [_forks_panel(directory, known, names)] if rounds else []
    panels += [_methods_panel(directory, known, names)]
    return write_page(place, f"{directory.run_id}: tournament {known.name}", verdict, failures or None, panels)


def _ranking_panel(known: Tournament, rounds: Sequence[Round]) -> Panel:
    tables = [Table(RANKING, _ranking_rows(rounds))]
    for number, each in enumerate(rounds, 1):
        rows = [_ranking_row(place, standing, each.stop) for place, standing in enumerate(each.standings, 1)]
        title = f"round {number}: after step {each.stop}, {each.num_kept} of {len(rows)} go on"
        tables.append(Table(RANKING, rows, title, is_folded=True))
    return Panel("Ranking", f"Forks of the run after step {known.at}, {_criterion(rounds)}.", tables=tables)


def _figures_panel(known: Tournament, names: Sequence[str]) -> Panel:
    tables = [Table(FIGURES, _figure_rows(known, names))]
    for name in names:
        rows = [(str(each.step), *_mean_figures([each])) for each in known.methods[name].figures]
        tables.append(Table(STEP, rows, f"{name}, by step", is_folded=True))
    return Panel("On the same steps", MEANINGS, tables=tables)


def _tokens_panel(known: Tournament, names: Sequence[str]) -> Panel:
    tables = []
    for name in names:
        rows = [
            (*map(str, (each.step, of.row, of.token)), repr(of.text), f"{of.a:+.6f}", f"{of.b:+.6f}")
            for each in known.methods[name].figures
            for of in each.shifts
        ]
        tables.append(Table(SHIFTS, rows, name, is_folded=True))
    return Panel(
        "Tokens",
        "The trained tokens whose log-prob the run's update or the method's moves most, in nats.",
        tables=tables,
    )


def _forks_panel(directory: RunDirectory, known: Tournament, names: Sequence[str]) -> Panel:
    rewards, accuracies = [], []
    for name in names:
        metrics = known.fork_of(directory, name).metrics
        steps = [each for each in metrics.steps() if each.step >= known.at and "reward" in each.metrics]
        evals = [each for each in metrics.evals() if each.policy_version >= known.at]
        rewards.append(Line(name, [each.step + 1 for each in steps], [each.metrics["reward"] for each in steps]))
        accuracies.append(Line(name, [each.policy_version for each in evals], [each.accuracy for each in evals], True))
    charts: list[Chart] = [line_chart("reward", rewards)]
    if any(line.x for line in accuracies):
        charts.append(line_chart("held-out accuracy", accuracies))
    text = "Each is a run of its own. Steps are counted from 1."
    configs = method_configs(directory, [known.methods[name] for name in names]).values()
    if known.num_steps is not None and any(config.optim.schedule != "constant" for config in configs):
        text += (
            f" With a decaying optim.schedule, a fork keeps the learning rate that the run has after step {known.at}."
        )
    return Panel("Forks", text, charts=charts)


def _methods_panel(directory: RunDirectory, known: Tournament, names: Sequence[str]) -> Panel:
    configs = method_configs(directory, [known.methods[name] for name in names])
    changes = differences(configs)
    rows = [(key, *(str(values.get(name, "-")) for name in names)) for key, values in changes.items()]
    return Panel(
        "Settings", f"What differs between methods; {OWN} is the run.", tables=[Table(("setting", *names), rows)]
    )
