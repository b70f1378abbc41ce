"""DDP and FSDP2 around MultiHeadAttention: two processes on the CPU do what one does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("distributed_worker.py")
WRAPPERS = ("ddp", "fsdp", "fsdp_of_packed_projection", "fsdp_of_every_projection")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(WORKER), str(rank), str(tmp_path / "meeting_point")]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    workers = [start(rank) for rank in range(2)]
    try:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    expected = [f"{name} {cross}" for name in WRAPPERS for cross in (False, True)]
    for worker, (output, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors
        assert output.splitlines() == expected
