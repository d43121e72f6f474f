"""Jobs: a file of prompts in, a file of texts out, resumable after any interruption.

Beside `out_file`, in the same folder:

    out_file                  one line for each text, in the order of the prompts
    out_file.stats.jsonl      for each of these lines one with its counts and times
    out_file.summary.json     totals, once all texts are written
    out_file.job.json         the job's description: hashes of prompts and checkpoints, settings that decide the texts
    out_file.lock             exists while a job runs, and is locked by it
    out_file.rank1-0.part     texts of one of several ranks; removed once rank 0 has merged them

The first two only grow, by whole lines. An interrupted job leaves whole lines and at most one incomplete line, which
the next run cuts off. The description is written first and atomically. An out file without one was not
written by a job and is refused. So a job can be resumed from every state in which it can be interrupted.

A written line survives the end of the process. Lines are flushed to disk every second and at the end. If the machine
fails, the texts of the last second may be lost, and the next run generates them again.

    prompts.py    reads the prompts, line by line
    deciding.py   the settings and files that the texts depend on
    disk.py       files that grow by whole lines, locks
    files.py      the files above: what an earlier run left, and appending to them
    ranks.py      communication between ranks
    progress.py   progress display, signals
    run.py        run_job
"""

from litspec.jobs.run import run_job

__all__ = ["run_job"]
