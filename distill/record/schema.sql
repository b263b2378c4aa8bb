-- What a run knows, as tables. Versions are two columns, lineage and step; seconds are those since the epoch.
-- `at` counts records in the order in which they were written.

CREATE TABLE opening (at INTEGER PRIMARY KEY, run TEXT, id TEXT, seed INTEGER, batch INTEGER, max_staleness INTEGER,
    hard_limit INTEGER, half_life REAL, completions INTEGER, supervised INTEGER);

-- A rollout, from the issue of its prompt on. status: pending, buffered, batched or dropped (then: reason, detail).
-- reverse_kl: mean of log mu - log q over its own tokens, nats; NULL where its arrays are gone or with a teacher.
CREATE TABLE rollout (id TEXT PRIMARY KEY, number INTEGER, source TEXT, environment TEXT, for_teacher INTEGER,
    issues INTEGER, status TEXT, reason TEXT, detail TEXT, scored INTEGER, teacher TEXT, by_teacher INTEGER,
    tokens INTEGER, own_tokens INTEGER, truncated INTEGER, reward REAL, reverse_kl REAL);
-- Which version sampled which of its tokens; none of a teacher's completion.
CREATE TABLE sampled (rollout TEXT, lineage INTEGER, step INTEGER, first INTEGER, past INTEGER);
CREATE INDEX sampled_by_rollout ON sampled (rollout);
CREATE TABLE requeue (at INTEGER, rollout TEXT, reason TEXT);

-- A start of the trainer, from a checkpoint (NULL: the model folder). It takes over the batches of `origin` up to
-- `branch`, the first step whose batch is its own.
CREATE TABLE lineage (number INTEGER PRIMARY KEY, at INTEGER, from_lineage INTEGER, from_step INTEGER,
    start INTEGER, origin INTEGER, branch INTEGER, ranks INTEGER, fingerprint TEXT);
-- The batch that is trained on top of a version, and the bound of ages when it was formed.
CREATE TABLE batch (lineage INTEGER, step INTEGER, max_staleness INTEGER, hard_limit INTEGER, half_life REAL,
    PRIMARY KEY (lineage, step));
CREATE TABLE member (lineage INTEGER, step INTEGER, place INTEGER, rollout TEXT, age INTEGER, weight REAL,
    PRIMARY KEY (lineage, step, place));

CREATE TABLE step (lineage INTEGER, step INTEGER);
CREATE TABLE version (at INTEGER, lineage INTEGER, step INTEGER, kind TEXT, bytes INTEGER, seconds REAL);
CREATE INDEX version_by_step ON version (lineage, step);
CREATE TABLE applied (replica TEXT, lineage INTEGER, step INTEGER, bytes INTEGER, stage_seconds REAL,
    pause_seconds REAL, apply_seconds REAL, seconds REAL);
CREATE TABLE checkpoint (at INTEGER, lineage INTEGER, step INTEGER);
CREATE TABLE rolled_back (at INTEGER, lineage INTEGER, step INTEGER, problem TEXT);
CREATE TABLE evaluation (lineage INTEGER, step INTEGER, reverse_kl REAL, pass_rate REAL, reward REAL, report TEXT);
-- An end of the run: replica → whether it held the trainer's weights, and what was not shown, as JSON.
CREATE TABLE conclusion (at INTEGER PRIMARY KEY, lineage INTEGER, step INTEGER, weights TEXT, problems TEXT);

-- What the run's files show: figures as JSON by their names, of the newest row of each step and of each evaluation;
-- work and waiting of roles; rollouts of some batches, reverse_kl as above.
CREATE TABLE metrics (lineage INTEGER, step INTEGER, time REAL, figures TEXT);
CREATE TABLE span (role TEXT, what TEXT, start REAL, past REAL);
CREATE TABLE sample (lineage INTEGER, step INTEGER, rollout TEXT, age INTEGER, teacher TEXT, own_tokens INTEGER,
    reverse_kl REAL, reward REAL, truncated INTEGER, by_teacher INTEGER, prompt TEXT, tokens TEXT);

-- The ranks' own files: which rollouts made a version of a lineage, and how many of their tokens are in the loss
-- (NULL: not said). `line` is read after the tables above, the others before them.
CREATE TABLE ledger (lineage INTEGER PRIMARY KEY, from_lineage INTEGER, from_step INTEGER, start INTEGER);
CREATE TABLE trained_step (lineage INTEGER, step INTEGER, tokens INTEGER, PRIMARY KEY (lineage, step));
CREATE TABLE trained (lineage INTEGER, step INTEGER, rank INTEGER, rollout TEXT);
CREATE TABLE line (lineage INTEGER, step INTEGER, rank INTEGER);

-- The newest step of each lineage that any table shows.
CREATE VIEW shown AS SELECT lineage, max(step) AS step FROM (
    SELECT lineage, step FROM step UNION ALL SELECT lineage, step FROM version UNION ALL
    SELECT lineage, step FROM applied UNION ALL SELECT lineage, step FROM checkpoint UNION ALL
    SELECT lineage, step FROM evaluation UNION ALL
    SELECT from_lineage, from_step FROM lineage WHERE from_lineage IS NOT NULL) GROUP BY lineage;
-- Whose batches a lineage is trained on: those of `owner` from step `first` on and before `past`.
CREATE VIEW chain AS WITH RECURSIVE chain (lineage, owner, first, past) AS (
    SELECT number, number, iif(origin IS NULL, 0, branch), 1 << 62 FROM lineage UNION ALL
    SELECT chain.lineage, origin.number, iif(origin.origin IS NULL, 0, origin.branch), min(chain.past, chain.first)
    FROM chain JOIN lineage AS child ON child.number = chain.owner
    JOIN lineage AS origin ON origin.number = child.origin) SELECT * FROM chain;
-- The batches on the path of the newest lineage.
CREATE VIEW path AS SELECT batch.lineage, batch.step FROM batch JOIN chain
    ON chain.owner = batch.lineage AND batch.step >= chain.first AND batch.step < chain.past
    WHERE chain.lineage = (SELECT max(number) FROM lineage);
-- The lineages whose steps are in the weights of a lineage, and up to which step.
CREATE VIEW ancestry AS WITH RECURSIVE ancestry (lineage, ancestor, until) AS (
    SELECT number, number, 1 << 62 FROM lineage UNION ALL
    SELECT ancestry.lineage, child.from_lineage, min(ancestry.until, child.from_step)
    FROM ancestry JOIN lineage AS child ON child.number = ancestry.ancestor
    WHERE child.from_lineage IS NOT NULL) SELECT * FROM ancestry;
-- The step up to which two lineages have the same weights; none where they share nothing but the model folder.
CREATE VIEW common AS WITH RECURSIVE shared (lineage, ancestor, until) AS (
    SELECT number, number, 1 << 62 FROM lineage UNION ALL
    SELECT child.number, shared.ancestor, min(shared.until, child.branch)
    FROM lineage AS child JOIN shared ON shared.lineage = child.origin)
    SELECT ours.lineage, theirs.lineage AS other, max(min(ours.until, theirs.until)) AS until
    FROM shared AS ours JOIN shared AS theirs USING (ancestor) GROUP BY 1, 2;
-- The age of each rollout when it was trained on, in versions (NULL: not on record), and the bound of its batch.
CREATE VIEW trained_age AS SELECT trained.lineage, trained.step, trained.rollout, coalesce(batch.hard_limit, 0) AS bound,
    iif(rollout.by_teacher, 0, trained.step - 1 - min(min(sampled.step, coalesce(common.until, 0)))) AS age
    FROM trained JOIN lineage ON lineage.number = trained.lineage
    LEFT JOIN rollout ON rollout.id = trained.rollout AND rollout.scored
    LEFT JOIN sampled ON sampled.rollout = rollout.id
    LEFT JOIN common ON common.lineage = trained.lineage AND common.other = sampled.lineage
    LEFT JOIN chain ON chain.lineage = trained.lineage AND trained.step > chain.first AND trained.step <= chain.past
    LEFT JOIN batch ON batch.lineage = chain.owner AND batch.step = trained.step - 1
    GROUP BY trained.rowid;
