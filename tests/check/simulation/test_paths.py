"""The decisions of runs, and the order in which others are tried."""

from halfstep.check.simulation.paths import MAX_DECISIONS, MAX_RUNS, Path, Search


def explored(questions, steps=10_000):
    """The answers of every run of a script that asks these questions."""
    search, runs = Search(steps), []
    for path in search.paths():
        path.steps -= 10
        runs.append(tuple(path.choose(question, number) for question, number in questions))
    return runs


def test_the_first_run_takes_the_defaults():
    """Nothing is forced in it."""
    assert explored([("a", 2), ("b", 3)])[0] == (0, 0)


def test_every_combination_is_run_once():
    """Two questions with two and three options have six runs."""
    runs = explored([("a", 2), ("b", 3)])
    assert sorted(runs) == sorted({(a, b) for a in range(2) for b in range(3)})
    assert len(runs) == 6


def test_runs_with_fewer_differences_come_first():
    """All runs with one changed answer are before those with two."""
    counts = [sum(run) for run in explored([(name, 2) for name in "abc"])]
    assert counts == sorted(counts)


def test_a_question_has_one_answer_in_a_run():
    """Asked again, it is not decided again."""
    path = Path((1,), 100)
    assert [path.choose("amp"), path.choose("amp"), path.choose("other")] == [1, 1, 0]
    assert len(path.taken) == 2


def test_a_settled_question_is_no_decision():
    """What follows from another answer is not tried the other way."""
    path = Path((), 100)
    path.settle("scaler is None", 1)
    assert path.choose("scaler is None") == 1
    assert path.taken == []


def test_the_number_of_runs_and_decisions_is_bounded():
    """A script with a thousand independent questions ends."""
    runs = explored([(str(i), 2) for i in range(1000)])
    assert len(runs) <= MAX_RUNS
    assert all(not any(run[MAX_DECISIONS:]) for run in runs)


def test_the_budget_ends_the_search():
    """Each run costs ten steps here."""
    assert len(explored([(name, 2) for name in "abcdef"], steps=35)) == 4


def test_fresh_keys_differ():
    """Two batches are two values."""
    path = Path((), 100)
    assert path.fresh("batch") != path.fresh("batch")
