"""
Every name that Pagemill has in Redis.

All keys of a queue begin with its base, `{pagemill:<queue>}`: the braces are the hash tag that
keeps them in one slot. The scripts build the same names from the base (lua/common.lua).

    name                type    written by              goes
    s:<lane>:<tenant>   stream  SUBMIT, hand-backs      COLLECT, once empty and unused
    in                  stream  any program             stays; an entry goes with its adoption
    streams             set     SUBMIT, COLLECT         stays
    pending             set     PULL, RECLAIM           with its last member
    ring:<lane>         zset    SUBMIT, PULL, FINISH    with its last member
    vt:<lane>           hash    PULL, FINISH            stays; COLLECT removes idle tenants
    tenants             hash    the operator            stays
    j:<id>              hash    all                     result_ttl_s after the job's end
    d:<id>              string  SUBMIT                  at the job's end
    r:<id>              string  FINISH and every end    result_ttl_s after the job's end
    ck:<id>             string  RENEW                   at the job's end
    t:<id>              stream  PUBLISH, FINISH         result_ttl_s after the job's end
    idem:<name>         string  SUBMIT                  result_ttl_s after the job's end
    delayed             zset    RETRY, PROMOTE          with its last member
    sus                 list    OBITUARY, RECLAIM       with its last member; groups of suspects that wait
    g:<group>           list    OBITUARY, RECLAIM       with its last member; jobs of a group
    dead                stream  OBITUARY, BURY, raw     stays; an entry goes by REQUEUE or PURGE
    rq:<entry>          string  REQUEUE                 after an hour; the job that a letter became
    deadlines           zset    SUBMIT, EXPIRE          with its last member
    b:<batch>           hash    CREATE_BATCH, all ends  30 days after its last activity; its ttl after its end
    bj:<batch>          set     SUBMIT, every end       with its last member, or with the batch
    batches             zset    CREATE_BATCH, SUBMIT    31 days after the last activity of a batch
    cancelling          set     CANCEL_BATCHES          with its last member, or after 31 days
    hooks               zset    the end of a batch      with its last member, or after 6 days
    reply:<name>        stream  every end that asks     stays; an entry goes when its reader is done with it
    ev                  stream  every end               stays; trimmed to about 100,000 entries
    st                  hash    all                     stays
    minutes             hash    FINISH                  two hours after the last minute in which a job ended
    w:<worker>          hash    HEARTBEAT               one lease after the last one
    workers             zset    HEARTBEAT, COLLECT      with its last member
    newest              string  HEARTBEAT               one lease after the last one of that version
    orphans             list    ends without a worker   a week after the last one; at most 10,000
    hold:<worker>       string  PULL                    two leases after it was set
    turn:<worker>       string  DISOWN, OBITUARY        after an hour
    limits              hash    the operator            stays
    qt:<lane>           hash    all                     with its last field
    bell:<lane>         list    SUBMIT, hand-backs      a minute after it was rung
    guard               string  SUBMIT                  after a second
    lock:sweep          string  LOCK                    after one turn of the sweeper
    lock:suspects       string  TAKE_SUSPECTS           a lease after its worker's last sign
    lease:<name>        string  LEASE                   its own time after it was last renewed
    tok                 hash    TOKENIZER               ten minutes after a worker last showed it
    server              hash    RECLAIM                 stays
    ch:<id>             channel every end of a job      -
    chb:<batch>         channel as ev, for batches      -

Fields of tenants: <tenant>:weight. Of limits: tenant:<tenant>, tenant:* for those that have none of
their own, lane:<lane>; each the most estimated tokens that may wait. Of qt:<lane>: <tenant>, the
estimated tokens that wait. Of st, beside counters of the whole queue: queued:<lane> and
queued_tokens:<lane>, what waits; tenant_tokens:<tenant> and tenant_gpu_ms:<tenant>, what its jobs
took, ever; retried:<kind> of fault; cancelled:waiting, those that no worker had; groups, the number of
the last group of suspects; drain:at, drain:from, drain:<lane>, the tokens of jobs that ended lately. Of
vt:<lane>: <tenant>, its virtual time; <tenant>!used and <tenant>!est, what its jobs took lately and were
estimated at; !now, the virtual time of who was served last.

Fields of j:<id>: st state, fp fingerprint, ln lane, tn tenant, tok tokens, e entry, own
worker, v version, att attempt, lapses leases that ran out, g group of suspects, crash workers that died while
it ran alone, cost tokens that its tenant was charged for it, acc accepted ms, run started ms, end
ended ms, dl deadline ms, ttl, stream, seed, idem, ref the payload's object, md metadata, ckm
checkpoint meta, x<answer> characters of it in the token stream, cancel, b batch; why it was put off,
rt for what kind of fault and how often in a row; reply the stream that is told of the
end, context what it is told with; pt, ct, gpu what it took: prompt tokens, completion
tokens, GPU ms.

Fields of an entry of dead: j job, why, msg message, at ms, worker, timeout ms where the job had a
deadline; d payload, or ref its object, or raw what never was a job, with entry where that can be put
back; and of the job's hash att, crash, lapses, ln, tn, tok, ttl, seed, fp, md, stream, idem, b, v, reply, context.

Fields of b:<batch>: fp fingerprint, tn tenant, ttl s, md metadata, created, sealed and ended ms; total,
done, failed, cancelled, expired; prompt_tokens, completion_tokens, gpu_ms of the jobs that have ended;
pct the percent of the newest event, cancel, scan where the cancelling goes on; hook its webhook's URL,
hook_st, hook_n and hook_err how its delivery stands; reply, context as of a job; seen ms
of an activity, an hour old at most; pace the ends of its jobs lately as a sum that fades with five minutes,
pace_at and pace_from ms of the last of them and of the first.

Fields of minutes: a ring of 64, <minute modulo 64>, each "<minute> <jobs> <prompt tokens> <completion tokens>"
of the jobs that workers ended in that minute since 1970.

Fields of tok: print the digest, z the compressed tokenizer.json.

One key is outside of all queues: `pagemill:models`, hash, model -> queue; HEARTBEAT's caller
writes it, and it stays.
"""

import re
from hashlib import blake2b

from pagemill.errors import SettingsError

MODELS = "pagemill:models"

_QUEUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

# what may live for ever, as the names behind the base; all else expires, or goes when its job ends
PERMANENT = ("s:", "in", "reply:", "streams", "vt:", "tenants", "limits", "ev", "st", "dead", "server")


class QueueKeys:
    """The names of one queue."""

    __slots__ = (
        *("base", "batches", "dead", "delayed", "events", "isolation", "limits", "minutes", "orphans", "queue"),
        *("raw", "stats", "tenants", "tokenizer", "workers"),
    )

    def __init__(self, queue: str) -> None:
        if not _QUEUE.fullmatch(queue):
            raise SettingsError(f"the queue's name is {queue!r}: want letters, digits, dots, dashes, underscores")
        self.queue = queue
        self.base = f"{{pagemill:{queue}}}"
        self.batches = f"{self.base}:batches"
        self.dead = f"{self.base}:dead"
        self.delayed = f"{self.base}:delayed"
        self.events = f"{self.base}:ev"
        self.isolation = f"{self.base}:lock:suspects"
        self.limits = f"{self.base}:limits"
        self.minutes = f"{self.base}:minutes"
        self.orphans = f"{self.base}:orphans"
        self.raw = f"{self.base}:in"
        self.stats = f"{self.base}:st"
        self.tenants = f"{self.base}:tenants"
        self.tokenizer = f"{self.base}:tok"
        self.workers = f"{self.base}:workers"

    def job(self, job_id: str) -> str:
        return f"{self.base}:j:{job_id}"

    def result(self, job_id: str) -> str:
        return f"{self.base}:r:{job_id}"

    def batch(self, batch_id: str) -> str:
        return f"{self.base}:b:{batch_id}"

    def batch_channel(self, batch_id: str) -> str:
        return f"{self.base}:chb:{batch_id}"

    def tokens(self, job_id: str) -> str:
        return f"{self.base}:t:{job_id}"

    def channel(self, job_id: str) -> str:
        return f"{self.base}:ch:{job_id}"

    def bell(self, lane: str) -> str:
        return f"{self.base}:bell:{lane}"

    def replies(self, name: str) -> str:
        return f"{self.base}:reply:{name}"

    def waiting(self, lane: str) -> str:
        return f"{self.base}:qt:{lane}"

    def worker(self, worker_id: str) -> str:
        return f"{self.base}:w:{worker_id}"


def idempotency_name(tenant: str, key: str) -> str:
    """What stands for a caller's own key: of fixed length, and no two tenants share one."""
    return blake2b(f"{tenant}\0{key}".encode(), digest_size=16).hexdigest()


def is_permanent(name: str) -> bool:
    """Whether the key may stay when all jobs have ended and all workers have left."""
    if name == MODELS:
        return True
    _, _, rest = name.partition("}:")
    return any(rest.startswith(kind) if kind.endswith(":") else rest == kind for kind in PERMANENT)
