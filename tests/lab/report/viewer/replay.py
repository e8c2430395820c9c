"""Replay the record of a scene: attention computed only from the page's JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray


def number(x: Any) -> Any:
    """Convert JSON back to an array, with "-inf" as a number."""
    return np.array(x).astype(np.float64)


class Replay:
    """HBM and SRAM by the events of one run; yields the index and numbers of each computing event."""

    def __init__(self, scene: dict[str, Any], order: str) -> None:
        self.scene, self.run, self.order = scene, scene["runs"][order], order
        n_q, n_k, d = scene["n_q"], scene["n_k"], scene["dim"]
        self.hbm: dict[str, Array] = {name: number(x) for name, x in scene["inputs"].items()}
        self.hbm |= {"O": np.zeros((n_q, d)), "L": np.zeros(n_q), "m": np.full(n_q, -np.inf), "l": np.zeros(n_q)}
        self.hbm |= {"S": np.zeros((n_q, n_k)), "P": np.zeros((n_q, n_k))}
        self.hbm |= {"dQ": np.zeros((n_q, d)), "dK": np.zeros((n_k, d)), "dV": np.zeros((n_k, d))}
        if order == "backward":
            lse = number(scene["exact"]["lse"])
            self.hbm["L"] = np.where(np.isneginf(lse), np.inf, lse)
            self.hbm["D"] = (self.hbm["dO"] * number(scene["exact"]["out"])).sum(axis=1)
        self.sram: dict[str, Array] = {}

    def block(self, name: str, n: int) -> slice:
        grid = self.run["grid"]
        step, last = (grid["bc"], grid["n_k"]) if name in ("K", "V", "dK", "dV") else (grid["br"], grid["n_q"])
        return slice(n * step, min((n + 1) * step, last))

    def scores(self, i: int, j: int) -> Array:
        rows, cols = self.block("Q", i), self.block("K", j)
        S = self.sram["Q"] @ self.sram["K"].T * self.scene["dim"] ** -0.5
        query, key = np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)[None, :]
        band = self.scene["band"]
        distance = key - query - band["offset"]
        low = -np.inf if band["left"] is None else -band["left"]
        high = np.inf if band["right"] is None else band["right"]
        seen = (low <= distance) & (distance <= high)
        if self.scene["spans"] is not None:
            limits = np.broadcast_to(self.scene["spans"], (self.scene["n_q"], *np.shape(self.scene["spans"])[1:]))[rows]
            begin, end = limits[:, None, :, 0], limits[:, None, :, 1]
            seen = seen & ((begin <= key[..., None]) & (key[..., None] < end)).any(-1)
        return np.where(seen, S, -np.inf)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Array]]]:
        for at, (what, a, *more) in enumerate(self.run["events"]):
            match what:
                case "Launch":
                    self.sram = {}
                case "Load":
                    self.load(a, more[0])
                case "Zero":
                    self.zero(a, more[0])
                case "Store":
                    self.store(a, more[0])
                case "Tile":
                    yield at, self.gradients(a, more[0]) if self.order == "backward" else self.absorb(a, more[0])
                case "Make":
                    yield at, self.make(a, more[0])

    def load(self, name: str, n: int) -> None:
        self.sram[name] = self.hbm[name][self.block(name, n)].copy()
        if name == "O":  # divided in HBM, summed in SRAM
            self.sram["O"] *= self.sram["l"][:, None]

    def zero(self, name: str, n: int) -> None:
        rows = self.block(name, n)
        self.sram[name] = np.zeros_like(self.hbm[name][rows])
        if name == "O":
            self.sram |= {"m": np.full(len(self.sram["O"]), -np.inf), "l": np.zeros(len(self.sram["O"]))}

    def store(self, name: str, n: int) -> None:
        rows = self.block(name, n)
        if name == "L":
            with np.errstate(divide="ignore"):
                self.sram["L"] = np.where(self.sram["l"] == 0, -np.inf, self.sram["m"] + np.log(self.sram["l"]))
        divided = name == "O" and self.order != "standard"
        self.hbm[name][rows] = self.divided() if divided else self.sram[name]

    def divided(self) -> Array:
        l = self.sram["l"]
        return self.sram["O"] / np.where(l == 0, 1, l)[:, None]

    def absorb(self, i: int, j: int) -> dict[str, Array]:
        S, s = self.scores(i, j), self.sram
        m = np.maximum(s["m"], S.max(axis=1))
        base = np.where(np.isneginf(m), 0, m)
        factor, P = np.exp(s["m"] - base), np.exp(S - base[:, None])
        l = s["l"] * factor + P.sum(axis=1)
        s |= {"m": m, "l": l, "O": s["O"] * factor[:, None] + P @ s["V"]}
        return {"S": S, "P": P, "factor": factor, "m": m, "l": l, "out": self.divided()}

    def gradients(self, i: int, j: int) -> dict[str, Array]:
        S, s, scale = self.scores(i, j), self.sram, self.scene["dim"] ** -0.5
        P = np.exp(S - s["L"][:, None])
        dP = s["dO"] @ s["V"].T
        dS = P * (dP - s["D"][:, None])
        s["dV"] = s["dV"] + P.T @ s["dO"]
        s["dQ"] = s["dQ"] + dS @ s["K"] * scale
        s["dK"] = s["dK"] + dS.T @ s["Q"] * scale
        return {"S": S, "P": P, "dP": dP, "dS": dS, "out": s["dQ"]}

    def make(self, name: str, n: int) -> dict[str, Array]:
        s = self.sram
        if name == "S":
            s["S"] = self.scores(n, 0)
        elif name == "P":
            m = s["S"].max(axis=1, keepdims=True)
            P = np.exp(s["S"] - np.where(np.isneginf(m), 0, m))
            s["P"] = P / np.maximum(P.sum(axis=1, keepdims=True), 1e-300)
        else:
            s["O"] = s["P"] @ s["V"]
        return {"out" if name == "O" else name: s[name]}
