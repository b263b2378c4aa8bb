-- What the run's files show: figures as JSON by their names, of the newest row of each step and of each evaluation;
-- work and waiting of roles; rollouts of some batches, reverse_kl as above.
CREATE TEMP TABLE metrics (lineage INTEGER, step INTEGER, time REAL, figures TEXT);
CREATE TEMP TABLE span (role TEXT, what TEXT, start REAL, past REAL);
CREATE TEMP TABLE sample (lineage INTEGER, step INTEGER, rollout TEXT, age INTEGER, teacher TEXT, own_tokens INTEGER,
    reverse_kl REAL, reward REAL, truncated INTEGER, by_teacher INTEGER, prompt TEXT, tokens TEXT);

-- The ranks' own files: which rollouts made a version of a lineage, and how many of their tokens are in the loss
-- (NULL: not said). `line` is read after the tables above, the others before them.
CREATE TEMP TABLE ledger (lineage INTEGER PRIMARY KEY, from_lineage INTEGER, from_step INTEGER, start INTEGER);
CREATE TEMP TABLE trained_step (lineage INTEGER, step INTEGER, tokens INTEGER, PRIMARY KEY (lineage, step));
CREATE TEMP TABLE trained (lineage INTEGER, step INTEGER, rank INTEGER, rollout TEXT);
CREATE TEMP TABLE line (lineage INTEGER, step INTEGER, rank INTEGER);

-- The age of each rollout when it was trained on, in versions (NULL: not on record), and the bound of its batch.
CREATE TEMP VIEW trained_age AS SELECT trained.lineage, trained.step, trained.rollout, coalesce(batch.hard_limit, 0) AS bound,
    iif(rollout.by_teacher, 0, trained.step - 1 - min(min(sampled.step, coalesce(common.until, 0)))) AS age
    FROM trained JOIN lineage ON lineage.number = trained.lineage
    LEFT JOIN rollout ON rollout.id = trained.rollout AND rollout.scored
    LEFT JOIN sampled ON sampled.rollout = rollout.id
    LEFT JOIN common ON common.lineage = trained.lineage AND common.other = sampled.lineage
    LEFT JOIN chain ON chain.lineage = trained.lineage AND trained.step > chain.first AND trained.step <= chain.past
    LEFT JOIN batch ON batch.lineage = chain.owner AND batch.step = trained.step - 1
    GROUP BY trained.rowid;
