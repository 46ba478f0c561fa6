"""``make demo``: three workers share a table while one is killed, one joins, one is paused and one leaves.

The work is real: every source file of the running Python's standard library is one row of a table, and is parsed once
to count its lines, functions and classes. In the order in which one would read it:

- :mod:`~jobsync_orm.demo.counting`: the work, without database.
- :mod:`~jobsync_orm.demo.model`: the tables.
- :mod:`~jobsync_orm.demo.worker`: one worker process. This is what an application looks like.
- :mod:`~jobsync_orm.demo.fleet`: starts, kills and stops worker processes.
- :mod:`~jobsync_orm.demo.cluster`: reads from the library's own tables who owns what.
- :mod:`~jobsync_orm.demo.director`: the story, from an empty database to the verdict.
- :mod:`~jobsync_orm.demo.view`: what is seen of it.
- :mod:`~jobsync_orm.demo.proof`: has everything counted again in one process, without the library, and compares.

What it shows: with crashes, joins and leaves every file is done, and done once. A worker that is killed in the middle
of a file has stored nothing of it, so another does that file anew. A worker that is paused in the middle of a file, for
longer than it may be silent, wakes up and stores its result: the commit is refused, because the file has another owner.
"""
