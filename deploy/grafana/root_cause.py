"""Why is it slow, or wrong?"""

from panels import QUEUE, RATE, Panel, Rows, grows, of_queue, quantile, rate

ROWS: Rows = (
    (
        "Where the time goes",
        (
            Panel(
                "Waiting and running, p95",
                "Is it the queue, or the engine?",
                (
                    (quantile(0.95, "pagemill_job_wait_seconds"), "{{queue}} {{lane}} waits"),
                    (quantile(0.95, "pagemill_job_run_seconds"), "{{queue}} {{lane}} runs"),
                ),
                unit="s",
            ),
            Panel(
                "From acceptance to result, p95",
                "What a producer sees.",
                ((quantile(0.95, "pagemill_job_e2e_seconds"), "{{queue}} {{lane}}"),),
                unit="s",
            ),
            Panel(
                "Why pulls bring nothing",
                "no_blocks: the engine is full. no_jobs: the queue is empty. unwritten: a server is away.",
                ((rate("pagemill_pull_empty_total", "queue, why"), "{{queue}} {{why}}"),),
                unit="ops",
            ),
            Panel(
                "What pulls may claim",
                "Tokens of KV cache, by lane.",
                ((f"sum by (queue, lane) (pagemill_pull_budget_tokens{{{QUEUE}}})", "{{queue}} {{lane}}"),),
            ),
            Panel(
                "Jobs in hand",
                "intake: being read. engine: given to it. ended: not written yet.",
                (
                    (f"sum by (queue, phase) (pagemill_held_jobs{{{QUEUE}}})", "{{queue}} {{phase}}"),
                    (f"sum by (queue) (pagemill_unwritten_results{{{QUEUE}}})", "{{queue}} unwritten"),
                    (of_queue("pagemill_inflight_jobs"), "{{queue}} by the queue"),
                ),
            ),
            Panel(
                "Jobs that a pull may claim, and did",
                "The budget in jobs, and claims a second.",
                (
                    (f"sum by (queue) (pagemill_pull_budget_jobs{{{QUEUE}}})", "{{queue}} budget"),
                    (rate("pagemill_pull_claimed_total"), "{{queue}} claimed/s"),
                ),
            ),
        ),
    ),
    (
        "Engines",
        (
            Panel(
                "Step time",
                "How many turns lasted how long.",
                ((f"sum by (le) (increase(pagemill_engine_step_seconds_bucket{{{QUEUE}}}{RATE}))", "{{le}}"),),
                unit="s",
                kind="heatmap",
            ),
            Panel(
                "Step time by worker, p95",
                "A slow card stands out.",
                ((quantile(0.95, "pagemill_engine_step_seconds", by="instance"), "{{instance}}"),),
                unit="s",
            ),
            Panel(
                "Age of the present step",
                "One that grows does not end.",
                ((f"pagemill_engine_step_age_seconds{{{QUEUE}}}", "{{instance}}"),),
                unit="s",
            ),
            Panel(
                "Running, waiting, swapped",
                "Sequences, over all engines.",
                (
                    (f"sum by (queue) (pagemill_engine_running{{{QUEUE}}})", "{{queue}} running"),
                    (f"sum by (queue) (pagemill_engine_waiting{{{QUEUE}}})", "{{queue}} waiting"),
                    (f"sum by (queue) (pagemill_engine_swapped{{{QUEUE}}})", "{{queue}} swapped"),
                ),
            ),
            Panel(
                "Restarts and engines that are gone",
                "Starts of a worker in half an hour; engines that do not work.",
                (
                    (
                        f'changes(process_start_time_seconds{{{QUEUE}, job="pagemill-worker"}}[30m])',
                        "{{instance}} starts",
                    ),
                    (f"1 - pagemill_engine_up{{{QUEUE}}}", "{{instance}} engine gone"),
                ),
            ),
            Panel(
                "Out of memory",
                "Times that the device had none; memory and processor time of the worker's process.",
                (
                    (f"increase(pagemill_engine_sheds_total{{{QUEUE}}}[30m])", "{{instance}} device"),
                    (f"rate(process_cpu_seconds_total{{{QUEUE}}}{RATE})", "{{instance}} cores"),
                ),
            ),
            Panel(
                "What runs",
                "Version, model and engine of each worker.",
                ((f"pagemill_worker_info{{{QUEUE}}}", "{{instance}}"),),
                kind="table",
                width=16,
            ),
            Panel(
                "Memory of the process",
                "Resident.",
                ((f"process_resident_memory_bytes{{{QUEUE}}}", "{{instance}}"),),
                unit="bytes",
            ),
        ),
    ),
    (
        "Jobs that come back",
        (
            Panel(
                "Redeliveries",
                "crash: a job may have ended its worker. lapse: the worker fell silent. release: it drained.",
                ((grows("pagemill_redeliveries_total", "queue, cause", window="[15m]"), "{{queue}} {{cause}}"),),
                unit="ops",
            ),
            Panel(
                "Retries by kind of fault",
                "engine, answer, memory, store, payload, version.",
                ((grows("pagemill_retries_total", "queue, class", window="[15m]"), "{{queue}} {{class}}"),),
                unit="ops",
            ),
            Panel(
                "Results that were not published",
                "fenced: another worker has the job. duplicate: it had ended. gone: it was forgotten.",
                (
                    (rate("pagemill_results_dropped_total", "queue, why"), "{{queue}} {{why}}"),
                    (rate("pagemill_leases_lost_total"), "{{queue}} leases lost"),
                    (grows("pagemill_fenced_total", window="[15m]"), "{{queue}} refused by the queue"),
                ),
                unit="ops",
            ),
            Panel(
                "How jobs ended in an hour",
                "By outcome and reason.",
                (
                    (
                        f"sum by (queue, lane, outcome, reason) (increase(pagemill_jobs_total{{{QUEUE}}}[1h])) > 0",
                        "{{outcome}} {{reason}}",
                    ),
                ),
                kind="table",
            ),
            Panel(
                "Put aside",
                "Jobs that wait for a second try, to run alone, or to be adopted; and those given up.",
                (
                    (of_queue("pagemill_delayed_jobs"), "{{queue}} delayed"),
                    (of_queue("pagemill_suspect_jobs"), "{{queue}} suspects"),
                    (of_queue("pagemill_raw_entries"), "{{queue}} raw"),
                    (
                        f"max by (queue) (increase(pagemill_buried_total{{{QUEUE}}}[1h]))",
                        "{{queue}} given up in an hour",
                    ),
                ),
            ),
            Panel(
                "Cancelled, and too late",
                "In an hour.",
                (
                    (
                        f"max by (queue, phase) (increase(pagemill_cancelled_total{{{QUEUE}}}[1h]))",
                        "{{queue}} cancelled, {{phase}}",
                    ),
                    (f"max by (queue) (increase(pagemill_deadline_missed_total{{{QUEUE}}}[1h]))", "{{queue}} too late"),
                    (of_queue("pagemill_deadline_seconds"), "{{queue}} s to the nearest deadline"),
                ),
            ),
        ),
    ),
    (
        "Servers",
        (
            Panel(
                "Redis round trips, p99",
                "By script.",
                ((quantile(0.99, "pagemill_redis_op_seconds", by="queue, op"), "{{queue}} {{op}}"),),
                unit="s",
            ),
            Panel(
                "Redis errors",
                "Calls that failed, by script.",
                ((rate("pagemill_redis_errors_total", "queue, op"), "{{queue}} {{op}}"),),
                unit="ops",
            ),
            Panel(
                "Redis",
                "Evicted keys lose jobs; rejected connections mean maxclients.",
                (
                    (of_queue("pagemill_redis_evicted_keys_total"), "{{queue}} evicted"),
                    (of_queue("pagemill_redis_rejected_connections_total"), "{{queue}} rejected"),
                    (of_queue("pagemill_redis_noeviction"), "{{queue}} noeviction"),
                    (of_queue("pagemill_redis_append_only"), "{{queue}} append-only"),
                    (of_queue("pagemill_redis_last_write_ok"), "{{queue}} last write ok"),
                ),
            ),
            Panel(
                "Object store, p99",
                "By operation.",
                ((quantile(0.99, "pagemill_store_op_seconds", by="queue, op"), "{{queue}} {{op}}"),),
                unit="s",
            ),
            Panel(
                "Object store errors",
                "away: try again. refused: credentials, or a wrong bucket. missing: the object is not there.",
                ((rate("pagemill_store_errors_total", "queue, op, error"), "{{queue}} {{op}} {{error}}"),),
                unit="ops",
            ),
            Panel(
                "Spilled",
                "Payloads read from the object store, results written to it.",
                ((rate("pagemill_store_bytes_total", "queue, direction"), "{{queue}} {{direction}}"),),
                unit="Bps",
            ),
            Panel(
                "Spans",
                "Traces. failed: no collector took them. dropped: they came faster than they could be sent.",
                ((rate("pagemill_trace_spans_total", "queue, outcome"), "{{queue}} {{outcome}}"),),
                unit="ops",
            ),
        ),
    ),
)
