-- with: admission
-- SUBMIT: take jobs in, each once.
--
-- KEYS[1]  base
-- Reads and writes
--   j:<id>            hash    the job; its existence is the idempotency record of its id
--   d:<id>            string  the payload
--   idem:<name>       string  "<job id> <fingerprint>", for a key of the caller's own
--   s:<lane>:<tenant> stream  the pointer
--   ring:<lane>       zset    the tenant's virtual time, if it had nothing waiting
--   vt:<lane>         hash    virtual times of tenants that are not in the ring
--   deadlines         zset    where a job has one
--   b:<batch>         hash    where a job is one of a batch: does it take jobs; how many it has
--   bj:<batch>        set     its open jobs
--   batches           zset    lives as long as the batches that it names
--   limits            hash    read: tenant:<tenant>, tenant:*, lane:<lane> -> most tokens that may wait
--   qt:<lane>         hash    tokens that wait, by tenant
--   st, guard, streams, bell:<lane>
-- ARGV
--   1 most tokens that may wait, 0 for no limit; then 17 a job:
--   1 id   2 fingerprint   3 idempotency name or ""   4 payload   5 payload ref (one of the two is "")
--   6 lane   7 tenant   8 estimated tokens   9 timeout ms or 0   10 result ttl s   11 stream 0/1
--   12 seed   13 metadata JSON or ""   14 batch or ""   15 version of the job
--   16 stream of replies or ""   17 context of the reply or ""
-- Returns
--   one a job: 1 for taken in | {"DUP", first id, its state, its payload ref} | {"CONFLICT", first id}
--   | {"BUSY", "memory" | "tokens" | "tenant" | "lane", retry ms}
--   | {"NOBATCH", batch} | {"CLOSED", batch}

local replies = {}
for i = 2, #ARGV, FIELDS do
  local job = read_job(i)
  replies[#replies + 1] = refusal(job) or take_in(job)
end
close_books()
return replies
