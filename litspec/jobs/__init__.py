"""Many prompts: a file of them in, a file of texts out, whatever happens on the way.

Beside `out_file`, in the same folder:

    out_file                  one line for each text, in the order of the prompts
    out_file.stats.jsonl      for each of these lines one with its counts and times
    out_file.summary.json     totals, when all texts are there
    out_file.job.json         what was asked: hashes of prompts and checkpoints, and the settings that decide the texts
    out_file.lock             there while a job runs, and locked by it
    out_file.rank1-0.part     texts of one of several ranks, until the first rank has put them in order; then removed

The first two only ever grow, by whole lines, so whatever ends a job leaves whole lines and at most one torn one, which
the next run cuts off. The description is written before them, all of it or nothing, and no file without one is taken
for ours. So a job can be resumed from every state that it can be interrupted in.

A line survives the end of the process as soon as it is written. Lines are forced to the disk once a second and at the
end, so the end of the machine costs at most the texts of its last second, which are made again.

    prompts.py    what is asked, line by line
    deciding.py   what the texts depend on, so that a job goes on as it began
    disk.py       files that grow by whole lines, locks
    files.py      the files above: what an earlier run left, and how they grow
    ranks.py      what several ranks tell each other
    progress.py   what a person sees, signals
    run.py        run_job
"""

from litspec.jobs.run import run_job

__all__ = ["run_job"]
