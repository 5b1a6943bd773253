"""From rows of panels to the JSON that Grafana loads."""

from typing import Any

from panels import Panel, Rows

SOURCE = {"type": "prometheus", "uid": "pagemill-prometheus"}
WIDTH = 24


def dashboard(uid: str, title: str, text: str, rows: Rows, since: str) -> dict[str, Any]:
    """What Grafana loads."""
    return {
        "uid": f"pagemill-{uid}",
        "title": title,
        "description": text,
        "tags": ["pagemill"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": since, "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {
                "title": "Pagemill",
                "type": "dashboards",
                "tags": ["pagemill"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {
            "list": [
                {
                    "name": "queue",
                    "label": "Queue",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": "label_values(pagemill_source_up, queue)", "refId": "queue"},
                    "definition": "label_values(pagemill_source_up, queue)",
                    "refresh": 2,
                    "sort": 1,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": ["All"], "value": ["$__all"]},
                }
            ]
        },
        "panels": lay_out(rows),
    }


def lay_out(rows: Rows) -> list[dict[str, Any]]:
    """Panels from left to right, and a title over each row of them."""
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in rows:
        found.append(
            {
                "id": len(found) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        x, y, tallest = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            found.append(picture(panel, len(found) + 1, place))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return found


def picture(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    instant = panel.kind in ("stat", "table")
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": expr,
            "legendFormat": legend,
            "editorMode": "code",
            "instant": instant,
            "range": not instant,
            "format": {"table": "table", "heatmap": "heatmap"}.get(panel.kind, "time_series"),
        }
        for index, (expr, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults(panel), "overrides": []},
        "options": options(panel),
        "targets": targets,
    }


def defaults(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"unit": panel.unit, "thresholds": thresholds(panel.steps), "mappings": []}
    if panel.kind == "stat":
        found |= {"color": {"mode": "thresholds"}, "noValue": "–"}
    if panel.kind == "timeseries":
        found["color"] = {"mode": "palette-classic"}
        found["min"] = 0 if panel.unit != "short" or panel.stacked else None
        found["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return {name: value for name, value in found.items() if value is not None}


def thresholds(steps: tuple[float, float] | None) -> dict[str, Any]:
    if steps is None:
        colours = [("green", None)]
    elif steps[0] <= steps[1]:
        colours = [("green", None), ("yellow", steps[0]), ("red", steps[1])]
    else:
        colours = [("red", None), ("yellow", steps[1]), ("green", steps[0])]
    return {"mode": "absolute", "steps": [{"color": colour, "value": value} for colour, value in colours]}


def options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "background" if panel.steps else "value",
            "graphMode": "area",
            "textMode": "auto",
        }
    if panel.kind == "table":
        return {"showHeader": True}
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "legend": {"show": True}}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
