-- What a run knows, as rows. The controller alone writes them; a version is two columns, lineage and step; times are
-- seconds since the epoch, lengths are tokens. `at` counts what was written, in its order, over the whole run.

-- Small facts as JSON by name: cursor, bisection, counters, target (what replicas follow), at.
CREATE TABLE fact (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

-- A start of the controller. prompts: of an epoch, NULL: endless. supervised: tokens of a completion that are trained
-- on, NULL: all.
CREATE TABLE opening (at INTEGER PRIMARY KEY, run TEXT NOT NULL, seed INTEGER NOT NULL,
    batch INTEGER NOT NULL, max_staleness INTEGER NOT NULL, hard_limit INTEGER NOT NULL, half_life REAL NOT NULL,
    completions INTEGER NOT NULL, per_prompt INTEGER NOT NULL, prompts INTEGER, id TEXT, supervised INTEGER) STRICT;

-- What rollouts name often: sources, environments, teachers, URLs.
CREATE TABLE name (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
-- Arrays that lie together in arrays/<file>.bin: `size` bytes from `start` on with this crc32; gone with the file once
-- nothing needs it.
CREATE TABLE block (number INTEGER PRIMARY KEY, file INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    crc INTEGER NOT NULL) STRICT;
-- Rollouts as they are stored; the view `rollout` is what to ask.
--   number, own_tokens   NULL: as `row` and `tokens`
--   kept     msgpack of where its teacher keeps its scores: names of URL and boot, number, size, digest; NULL: nowhere
--   block, place   of its arrays, before it is scored of its prompt
CREATE TABLE rollout_row (row INTEGER PRIMARY KEY, id TEXT NOT NULL, number INTEGER, source INTEGER,
    environment INTEGER, for_teacher INTEGER NOT NULL DEFAULT 0, continues INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, reason TEXT, detail TEXT, scored INTEGER, admitted INTEGER, teacher INTEGER,
    by_teacher INTEGER, tokens INTEGER, own_tokens INTEGER, truncated INTEGER, reward REAL, reverse_kl REAL,
    spans TEXT, own TEXT, kept BLOB, block INTEGER NOT NULL, place INTEGER NOT NULL,
    CHECK (admitted IS NULL OR scored IS NOT NULL AND reason IS NULL)) STRICT;
CREATE INDEX pending ON rollout_row (row) WHERE scored IS NULL AND reason IS NULL;
CREATE INDEX buffered ON rollout_row (admitted) WHERE admitted IS NOT NULL;
-- A rollout, from the issue of its prompt on.
--   continues    what an episode said behind a context that was rewritten: it was not issued
--   attempts     completions that were broken off or reached a limit
--   scored       `at` of its admission, NULL: not scored
--   spans        JSON of [[lineage, step, first], ...]: which version sampled the tokens from `first` on; NULL: none
--   own          JSON of [[first, past], ...]: the student's tokens in an episode; NULL: all
--   reverse_kl   mean of log mu - log q over its own tokens, nats; NULL: the teacher keeps the scores, or there is none
CREATE VIEW rollout AS SELECT id, coalesce(rollout_row.number, row) AS number, source.name AS source,
    environment.name AS environment, for_teacher, continues, attempts, CASE WHEN reason IS NOT NULL THEN 'dropped' WHEN scored IS NULL THEN 'pending'
    WHEN admitted IS NULL THEN 'batched' ELSE 'buffered' END AS status, reason, detail, scored, teacher.name AS teacher,
    by_teacher, tokens, coalesce(own_tokens, tokens) AS own_tokens, truncated, reward, reverse_kl, spans, own, kept,
    rollout_row.row, block, place FROM rollout_row LEFT JOIN name AS source ON source.number = source
    LEFT JOIN name AS environment ON environment.number = environment
    LEFT JOIN name AS teacher ON teacher.number = teacher;
CREATE TABLE requeue (at INTEGER NOT NULL, rollout TEXT NOT NULL, reason TEXT NOT NULL) STRICT;

-- A start of the trainer, from a checkpoint (NULL: the model folder). It takes over the batches of `origin` up to
-- `branch`, the first step whose batch is its own.
CREATE TABLE lineage (number INTEGER PRIMARY KEY, at INTEGER NOT NULL, from_lineage INTEGER, from_step INTEGER,
    start INTEGER NOT NULL, origin INTEGER, branch INTEGER NOT NULL, ranks INTEGER NOT NULL,
    fingerprint TEXT NOT NULL) STRICT;
-- The batch that is trained on top of a version, and the bound of ages when it was formed. status: held while a
-- trainer may still request it; covered by the oldest kept checkpoint; left, when a later start of the trainer
-- forms another one and its rollouts wait again. members: JSON of [[row, age, weight], ...] in order, without a weight
-- of 1; the view `member` names them.
CREATE TABLE batch (lineage INTEGER NOT NULL, step INTEGER NOT NULL, max_staleness INTEGER NOT NULL,
    hard_limit INTEGER NOT NULL, half_life REAL NOT NULL, is_part INTEGER NOT NULL,
    members TEXT NOT NULL, trained INTEGER NOT NULL DEFAULT 0,
    status TEXT NOT NULL DEFAULT 'held' CHECK (status IN ('held', 'covered', 'left')),
    PRIMARY KEY (lineage, step)) STRICT;
CREATE INDEX held ON batch (status) WHERE status = 'held';
CREATE VIEW member AS SELECT lineage, step, member.key AS place,
    coalesce(rollout_row.id, 'row ' || json_extract(member.value, '$[0]')) AS rollout, json_extract(member.value, '$[1]') AS age,
    coalesce(json_extract(member.value, '$[2]'), 1.0) AS weight
    FROM batch JOIN json_each(members) AS member LEFT JOIN rollout_row ON row = json_extract(member.value, '$[0]');

-- A version that the trainer reached. tokens of its batch, and those of them that teachers generated; NULL: the batch is
-- covered. undone: a later start of the trainer began before it.
CREATE TABLE step (lineage INTEGER NOT NULL, step INTEGER NOT NULL, tokens INTEGER, tokens_by_teacher INTEGER,
    undone INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE version (at INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL,
    bytes INTEGER NOT NULL, full_bytes INTEGER NOT NULL, seconds REAL NOT NULL) STRICT;
CREATE INDEX version_by_step ON version (lineage, step);
CREATE TABLE applied (at INTEGER PRIMARY KEY, replica TEXT NOT NULL, lineage INTEGER NOT NULL, step INTEGER NOT NULL,
    bytes INTEGER NOT NULL, stage_seconds REAL NOT NULL, pause_seconds REAL NOT NULL, apply_seconds REAL NOT NULL,
    seconds REAL NOT NULL) STRICT;
-- gone: removed or damaged, as the trainer began from an older one later, or kept newer ones alone.
CREATE TABLE checkpoint (at INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, step INTEGER NOT NULL, path TEXT NOT NULL,
    gone INTEGER NOT NULL DEFAULT 0) STRICT;
-- Back to a checkpoint (NULL: the model folder), never to train on these rollouts (JSON list) again.
CREATE TABLE rolled_back (at INTEGER PRIMARY KEY, lineage INTEGER, step INTEGER, without TEXT NOT NULL,
    problem TEXT NOT NULL) STRICT;
CREATE TABLE evaluation (at INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, step INTEGER NOT NULL,
    reverse_kl REAL, pass_rate REAL, reward REAL, report TEXT NOT NULL) STRICT;
-- An end of the run: replica → whether it held the trainer's weights, and what was not shown, as JSON.
CREATE TABLE conclusion (at INTEGER PRIMARY KEY, lineage INTEGER, step INTEGER, weights TEXT NOT NULL,
    problems TEXT NOT NULL) STRICT;

-- Which version sampled which tokens of a rollout; none of a teacher's completion.
CREATE VIEW sampled AS SELECT rollout.id AS rollout, json_extract(span.value, '$[0]') AS lineage,
    json_extract(span.value, '$[1]') AS step, json_extract(span.value, '$[2]') AS first,
    coalesce(json_extract(spans, '$[' || (span.key + 1) || '][2]'), tokens) AS past
    FROM rollout_row AS rollout, json_each(rollout.spans) AS span;
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
