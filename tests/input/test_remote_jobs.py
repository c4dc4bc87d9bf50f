"""Jobs whose rows are elsewhere: begun, killed, resumed and refused as over local files, silent about secrets."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from remote_servers import CREDENTIALS, Remote, server_of
from run_helpers import JobMaker, journal_of, quiet, rows_of, without_timings

from batchgen.cli.main import cli
from batchgen.core import remote
from batchgen.core.errors import ExitCode, InputError, RemoteError, UsageError
from batchgen.input import input_bytes

NUM_ROWS = 400
in_a_bucket = pytest.mark.parametrize("place", ["moto"], indirect=True)
on_a_faulty_s3 = pytest.mark.parametrize("place", ["s3"], indirect=True)


def content_of(job: JobMaker, num_rows: int = NUM_ROWS) -> bytes:
    return job.write({**row, "pad": "x" * 100} for row in rows_of(num_rows)).read_bytes()


def expected(job: JobMaker) -> list[dict[str, Any]]:
    """What the same rows give from a file on this machine."""
    assert job.run(job.spec(output={"path": str(job.folder / "reference")})).exit_code == 0
    return without_timings(job.folder / "reference" / "outputs.jsonl")


def everything_written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@in_a_bucket
def test_a_job_over_a_bucket_is_stopped_and_resumed_with_the_same_outputs(place: Remote, job: JobMaker) -> None:
    address = place.put("job/rows.jsonl", content_of(job))
    spec = job.spec(input={"path": [address]})
    assert job.run(spec, quiet(max_total_tokens=3000)).exit_code == ExitCode.STOPPED
    assert json.loads((journal_of(job.output) / "job.json").read_bytes())["job"]["input"]["path"] == [address]
    assert job.run(spec).exit_code == 0
    assert job.outputs() == expected(job)
    assert job.run(spec).lines[0].startswith("already done")
    for secret in CREDENTIALS.values():
        assert secret.encode() not in everything_written(job.output)


@in_a_bucket
def test_another_version_is_no_resume_and_the_version_of_before_is_one(place: Remote, job: JobMaker) -> None:
    content = content_of(job)
    spec = job.spec(input={"path": [place.put("job/other.jsonl", content)]})
    assert job.run(spec, quiet(max_total_tokens=3000)).exit_code == ExitCode.STOPPED
    place.put("job/other.jsonl", content.replace(b"What is", b"Who was"))
    with pytest.raises(UsageError, match=r"most rows have changed; 0 of .* results would be left") as caught:
        job.run(spec)
    assert caught.value.exit_code == ExitCode.USAGE
    place.put("job/other.jsonl", content)
    assert job.run(spec).exit_code == 0
    assert job.outputs() == expected(job)


@on_a_faulty_s3
@pytest.mark.parametrize("change", ["replaced", "503"])
def test_what_happens_to_the_object_meanwhile_costs_no_row(
    place: Remote, job: JobMaker, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_bytes, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(input_bytes, "_CHEAP_BYTES", 0)
    monkeypatch.setattr(remote, "WAITS_S", (0.01,))
    content = content_of(job)
    spec = job.spec(input={"path": [place.put("rows.jsonl", content)]})

    def meddle(number: int) -> None:
        if number == 2 and change == "replaced":
            place.put("rows.jsonl", content.replace(b"What is", b"Who was"))
        elif number == 2:
            server_of(place).lasting = int(change)

    refused = InputError if change == "replaced" else RemoteError
    with pytest.raises(refused, match=r"rows\.jsonl.*run again to resume") as caught:
        job.run(spec, before_step=meddle)
    assert caught.value.exit_code == (ExitCode.USAGE if refused is InputError else ExitCode.CRASH)
    assert not (job.output / "outputs.jsonl").exists()
    server_of(place).lasting = None
    place.put("rows.jsonl", content)
    assert job.run(spec).exit_code == 0
    assert job.outputs() == expected(job)


@on_a_faulty_s3
def test_the_command_says_in_one_line_that_it_has_no_access(
    place: Remote, job: JobMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    address = place.put("rows.jsonl", content_of(job, 3))
    server_of(place).denies = True
    result = CliRunner().invoke(cli, ["run", str(job.toml(input={"path": [address]}))])
    assert result.exit_code != 0
    said = str(result.exception) + result.output + "".join(capfd.readouterr())
    assert said.count(f"cannot find {address}: access is refused") == 1
    for secret in CREDENTIALS.values():
        assert secret not in said
    assert not os.path.lexists(job.output)


@in_a_bucket
def test_a_plan_reads_addresses_too(place: Remote, job: JobMaker) -> None:
    address = place.put("job/plan.jsonl", content_of(job, 5) + b"{\n")
    result = CliRunner().invoke(cli, ["plan", str(job.toml(input={"path": [address]})), "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)
    assert plan["rows"]["total"] == 6
    assert plan["input"] == [address]


@pytest.mark.parametrize("place", ["web"], indirect=True)
@pytest.mark.parametrize("tail", ["?code={}", ";sig={}", "#access_token={}"])
def test_what_may_be_a_secret_in_a_url_is_in_no_file_and_may_change(place: Remote, job: JobMaker, tail: str) -> None:
    address = place.put("signed.jsonl", content_of(job, 20))
    if ";" in tail:
        place.put("signed.jsonl;sig=S3CR3T", content_of(job, 20))
        place.put("signed.jsonl;sig=0THER", content_of(job, 20))
    first = job.spec(input={"path": [address + tail.format("S3CR3T")]})
    assert job.run(first, quiet(max_total_tokens=200)).exit_code == ExitCode.STOPPED
    assert job.run(job.spec(input={"path": [address + tail.format("0THER")]})).exit_code == 0
    assert json.loads((job.output / "report.json").read_bytes())["input"] == [f"{address}{tail[0]}***{_digest(tail)}"]
    assert not any(secret in everything_written(job.output) for secret in (b"S3CR3T", b"0THER"))
    result = CliRunner().invoke(cli, ["run", str(job.output)])
    assert isinstance(result.exception, UsageError)
    assert "*** may be a secret and is not stored: give the address with --input" in str(result.exception)


def _digest(tail: str) -> str:
    return blake2b(tail.format("0THER").encode(), digest_size=4).hexdigest()
