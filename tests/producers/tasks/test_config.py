"""Settings of the Celery side, and what Celery makes of them."""

import datetime
from pathlib import Path

import pytest
from celery.beat import PersistentScheduler

from pagemill.errors import SettingsError
from pagemill.settings import ClientSettings
from producers.tasks.config import make_app, today
from producers.tasks.settings import CelerySettings, load_settings


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "PAGEMILL_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


def test_both_names_of_the_broker_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Celery's own variable goes first, as Celery would have it; ours works in the environment and in the file.
    """
    Path("pagemill.toml").write_text('celery_broker_url = "redis://file/1"\nredis_url = "redis://q/0"\n')
    in_file = load_settings()
    monkeypatch.setenv("PAGEMILL_CELERY_BROKER_URL", "redis://ours/1")
    ours = load_settings()
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://celerys/1")

    found = [one.celery_broker_url for one in (in_file, ours, load_settings())]

    assert ["redis://file/1", "redis://ours/1", "redis://celerys/1"] == found
    assert "redis://q/0" == in_file.redis_url


def test_other_programs_leave_these_names_alone() -> None:
    """
    A worker or a client that shares the file does not know them, and starts; their own names are still checked.
    """
    Path("pagemill.toml").write_text('celery_timezone = "UTC"\nqueue = "q"\n')
    assert "q" == ClientSettings.load().queue

    Path("pagemill.toml").write_text('quue = "q"\n')
    with pytest.raises(SettingsError, match="did you mean"):
        ClientSettings.load()


def test_a_misspelt_name_is_refused() -> None:
    """
    It would silently leave the default.
    """
    Path("pagemill.toml").write_text('celery_brokr_url = "redis://file/1"\n')

    with pytest.raises(SettingsError, match="celery_broker_url"):
        load_settings()


@pytest.mark.parametrize("name", ["celery_broker_url", "celery_result_backend"])
@pytest.mark.parametrize("scheme", ["redis", "REDISS"])
@pytest.mark.parametrize("special", "/?#[℀")
def test_a_password_that_is_not_escaped_is_refused_and_not_shown(name: str, special: str, scheme: str) -> None:
    """
    Celery would take its end for a database or a port, and say so.
    """
    settings = CelerySettings.model_validate({name: f"{scheme}://:12{special}hunter2@host:6379/1"})

    with pytest.raises(SettingsError, match=f"{name} has a password") as caught:
        make_app(settings)

    assert "hunter2" not in str(caught.value)


def test_nothing_is_lost_with_a_worker() -> None:
    """
    Tasks are acknowledged when they are done, fetched one by one, in JSON alone.
    """
    conf = make_app(CelerySettings(celery_broker_url="redis://b/1", celery_result_expires_s=600)).conf

    assert (True, True, 1) == (conf.task_acks_late, conf.task_reject_on_worker_lost, conf.worker_prefetch_multiplier)
    assert (["json"], "json", 600) == (conf.accept_content, conf.task_serializer, conf.result_expires)
    assert 300 == conf.broker_transport_options["visibility_timeout"]
    assert "redis://b/1" == conf.result_backend


def test_tasks_have_queues_of_their_own() -> None:
    """
    Bulk does not hold up the short tasks, and what others named without a queue goes to theirs.
    """
    app = make_app(CelerySettings(celery_callback_queue="theirs"))
    router = app.amqp.router

    queues = {name: router.route({}, name)["queue"].name for name in ("pagemill.generate", "pagemill.bulk", "x.y")}

    assert {"pagemill.generate": "pagemill.ingress", "pagemill.bulk": "pagemill.bulk", "x.y": "theirs"} == queues


def test_the_beat_sends_the_date_of_its_moment(tmp_path: Path) -> None:
    """
    A worker that comes to it a day late still works for the day that was meant; a kept schedule is read again.
    """
    Path("pagemill.toml").write_text(
        'celery_timezone = "Pacific/Kiritimati"\n[[celery_beat]]\nname = "news"\ncron = "30 1 * * 1-5"\n'
    )
    app = make_app(load_settings())
    for _ in range(2):
        beat = PersistentScheduler(app=app, schedule_filename=str(tmp_path / "beat"))
        [entry] = [one for one in beat.schedule.values() if one.task == "pagemill.bulk"]
        beat.close()

    before = today("Pacific/Kiritimati")
    sent = {name: value() if callable(value) else value for name, value in entry.kwargs.items()}

    assert {"news"} == {sent["name"]}
    assert before <= sent["date"] <= today("Pacific/Kiritimati")
    assert datetime.date.fromisoformat(sent["date"]) >= datetime.datetime.now(datetime.UTC).date()
    assert ({30}, {1}, {1, 2, 3, 4, 5}) == (entry.schedule.minute, entry.schedule.hour, entry.schedule.day_of_week)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('celery_timezone = "Mars/North"', "time zone"),
        ('[[celery_beat]]\nname = "news"\ncron = "daily"', "cron"),
        ('[[celery_beat]]\nname = "news"\ncron = "99 1 * * *"', "want a time like"),
        ('[[celery_beat]]\nname = "news"\ncorn = "1 1 * * *"', "corn"),
        ("celery_result_expires_s = 1", "CELERY_RESULT_EXPIRES_S"),
    ],
)
def test_a_wrong_value_is_named(text: str, word: str) -> None:
    """
    The operator is told which one, and what is wanted.
    """
    Path("pagemill.toml").write_text(text + "\n")

    with pytest.raises(SettingsError, match=word):
        make_app(load_settings())
