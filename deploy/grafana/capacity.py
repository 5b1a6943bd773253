"""How many workers will be needed?"""

from panels import BACKLOG, DRAIN, GENERATED, QUEUE, RATE, Panel, Rows, grows, of_queue, rate

ROWS: Rows = (
    (
        "Demand",
        (
            Panel(
                "Arrivals and ends",
                "Where arrivals stay above ends the backlog grows.",
                (
                    (
                        grows("pagemill_queue_jobs_total", extra=', event="accepted"', window="[1h]"),
                        "{{queue}} accepted",
                    ),
                    (grows("pagemill_queue_jobs_total", extra=', event="done"', window="[1h]"), "{{queue}} done"),
                ),
                unit="ops",
            ),
            Panel(
                "Tokens a day",
                "Of jobs that ended: prompts and answers.",
                (
                    (
                        f"max by (queue, kind) (increase(pagemill_queue_tokens_total{{{QUEUE}}}[1d]))",
                        "{{queue}} {{kind}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Tokens a day by tenant",
                "Of those that took most, where metrics_tenants is set.",
                (
                    (
                        f"max by (queue, tenant) (increase(pagemill_tenant_tokens_total{{{QUEUE}}}[1d]))",
                        "{{queue}} {{tenant}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Hours to drain, by number of workers",
                "Tokens that wait, at what one worker does.",
                tuple(
                    (
                        f"{BACKLOG} / ({count} * {of_queue('pagemill_autoscale_tokens_per_second')}) / 3600",
                        f"{{{{queue}}}} {count}",
                    )
                    for count in (1, 2, 4, 8, 16)
                ),
                unit="h",
            ),
            Panel(
                "Workers wanted",
                "And those that are there.",
                (
                    (of_queue("pagemill_autoscale_desired_workers"), "{{queue}} wanted"),
                    (f"sum by (queue) ({of_queue('pagemill_workers', 'queue, state')})", "{{queue}} there"),
                ),
            ),
            Panel(
                "What deadlines ask for",
                "Estimated tokens a second that have to end, and those that do.",
                (
                    (of_queue("pagemill_deadline_tokens_per_second"), "{{queue}} needed"),
                    (DRAIN, "{{queue}} done"),
                ),
            ),
            Panel(
                "Tokens waiting, a week's trend",
                "The mean of a day, and where it would be in a week.",
                (
                    (f"avg_over_time(({BACKLOG})[1d:10m])", "{{queue}} mean"),
                    (f"predict_linear(({BACKLOG})[2d:1h], 7 * 86400)", "{{queue}} in a week"),
                ),
                width=16,
            ),
            Panel(
                "Engine time for 1,000 tokens",
                "Seconds of an engine, of jobs that ended in the last hour.",
                (
                    (
                        f"1000 * max by (queue) (increase(pagemill_queue_gpu_seconds_total{{{QUEUE}}}[1h]))"
                        " / (sum by (queue) (max by (queue, kind) "
                        f"(increase(pagemill_queue_tokens_total{{{QUEUE}}}[1h]))) > 0)",
                        "{{queue}}",
                    ),
                ),
                unit="s",
            ),
        ),
    ),
    (
        "Use",
        (
            Panel(
                "Sequences in the batch",
                "Of those that may run.",
                (
                    (
                        f"sum by (queue) (pagemill_engine_running{{{QUEUE}}})"
                        f" / sum by (queue) (pagemill_engine_max_running{{{QUEUE}}})",
                        "{{queue}}",
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "Tokens a step",
                "Generated; the budget is what a step may compute, prompts too.",
                (
                    (f"{GENERATED} / ({rate('pagemill_engine_steps_total')} > 0)", "{{queue}} generated"),
                    (of_queue("pagemill_engine_max_step_tokens"), "{{queue}} budget"),
                ),
            ),
            Panel(
                "Time in steps",
                "Share of the time in which an engine computes.",
                ((f"avg by (queue) (rate(pagemill_engine_step_seconds_sum{{{QUEUE}}}{RATE}))", "{{queue}}"),),
                unit="percentunit",
            ),
            Panel(
                "GPU utilisation",
                "As the driver has it; nothing without a GPU.",
                ((f"pagemill_gpu_utilization_ratio{{{QUEUE}}}", "{{instance}}"),),
                unit="percentunit",
            ),
            Panel(
                "GPU memory and power",
                "Memory in use of what there is, and what is drawn.",
                (
                    (
                        f"pagemill_gpu_memory_used_bytes{{{QUEUE}}} / pagemill_gpu_memory_bytes{{{QUEUE}}}",
                        "{{instance}} memory",
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "Energy for 1,000 tokens",
                "Joules of the GPUs, by tokens generated.",
                (
                    (
                        f"1000 * {rate('pagemill_gpu_energy_joules_total')} / ({GENERATED} > 0)",
                        "{{queue}}",
                    ),
                    (f"sum by (queue) (pagemill_gpu_power_watts{{{QUEUE}}})", "{{queue}} watts now"),
                ),
                unit="short",
            ),
            Panel(
                "Preemptions",
                "Sequences that gave their blocks up, for each job that was pulled.",
                (
                    (
                        f"{rate('pagemill_engine_preemptions_total')} / ({rate('pagemill_pull_claimed_total')} > 0)",
                        "{{queue}}",
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "Prefix cache",
                "Prompt tokens that were found in it.",
                (
                    (
                        f"{rate('pagemill_engine_prefix_hit_tokens_total')}"
                        f" / ({rate('pagemill_engine_prefix_query_tokens_total')} > 0)",
                        "{{queue}}",
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "KV cache in tokens",
                "What there is, and what a new job could have.",
                (
                    (f"sum by (queue) (pagemill_engine_kv_tokens{{{QUEUE}}})", "{{queue}} all"),
                    (f"sum by (queue) (pagemill_engine_kv_free_tokens{{{QUEUE}}})", "{{queue}} free"),
                ),
            ),
        ),
    ),
)
