// The viewer shows the record at one moment. Counters, numbers and places are looked up, never recomputed.
(() => {
  "use strict";
  const root = document.getElementById("viewer");
  const record = JSON.parse(document.getElementById("scenes").textContent);
  const scenes = Object.fromEntries(record.scenes.map((scene) => [scene.name, scene]));
  const SIDE_BY_SIDE = ["standard", "fa1", "fa2"];
  const FRAMES_PER_SECOND = 4;

  // The whole state: what is shown depends on nothing else.
  const now = { scene: null, order: "fa2", step: 0, row: 0 };
  let timer = null; // set while it plays
  let noting = null; // set until the address is updated

  const one = (selector, within = root) => within.querySelector(selector);
  const all = (selector, within = root) => [...within.querySelectorAll(selector)];
  const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
  const count = (n) => n.toLocaleString("en-US");
  const minus = (text) => text.replace(/-/g, "\u2212");
  const number = (x) => minus(typeof x === "string" ? x.replace("inf", "\u221e") : x.toFixed(3).replace(/^-(0\.0+)$/, "$1"));
  const error = (x) => (x === 0 ? "0" : x >= 1e-3 ? number(x) : minus(x.toExponential(1)));
  const size = (n) => (n < 1024 ? `${n} B` : `${Number((n / 1024).toPrecision(4))} KiB`);
  const percent = (n, of) => `${Number(((100 * n) / of).toFixed(2))}%`;
  const fill = (sentence, values) => sentence.replace(/\{(\w+)\}/g, (_, name) => values[name]);

  const pass = () => (now.order === "backward" ? "backward" : "forward");
  const orders = () => (now.order === "backward" ? ["backward"] : SIDE_BY_SIDE);
  const scene = () => scenes[now.scene];
  const frames = () => scene().frames[now.order];
  const runOf = (order) => scene().runs[order];
  const stepOf = (order, step = now.step) => frames()[step][orders().indexOf(order)];

  // ---- Panels ----

  function drawPanel(panel) {
    const order = panel.dataset.order;
    const [run, step, most] = [runOf(order), stepOf(order), scene().most[pass()]];
    const counts = Object.fromEntries(record.counters.map((name, at) => [name, run.counts[step][at]]));
    panel.classList.toggle("followed", order === now.order);
    panel.classList.toggle("done", step === run.events.length);
    one(".follow", panel).setAttribute("aria-pressed", String(order === now.order));
    put(one("[data-caption]", panel), run.captions[step]);
    for (const place of all("[data-count]", panel)) put(place, count(counts[place.dataset.count]));
    one("[data-meter]", panel).style.width = percent(counts.moved, most.moved);
    one("[data-closed]", panel).classList.toggle("landed", counts.moved === run.closed);
    run.names.forEach((name, at) => {
      one(`[data-part="${name}"]`, panel).style.width = percent(run.sram[step][at], most.peak);
    });
    one("[data-peak]", panel).style.left = percent(counts.peak, most.peak);
    drawStage(one(".stage", panel), run, step);
  }

  // S and the arrays around it. Clears all marks, then replays the events so far.
  function drawStage(stage, run, step) {
    const blocks = all(".block, .times", stage);
    const tileAt = (i, j) => one(`.tile[data-i="${i}"][data-j="${j}"]`, stage);
    const at = (name, n) => blocks.filter((b) => b.dataset.a === name && b.dataset.n === String(n));
    const mark = (elements, ...states) => elements.forEach((element) => element.classList.add(...states));
    all(".tile", stage).forEach((tile) => tile.classList.remove("now", "done", "stored", "S", "P"));
    all(".beam", stage).forEach((beam) => beam.classList.remove("on"));
    for (const block of blocks) {
      block.classList.remove("written", "in", "now", "out", "on");
      if (block.matches(".times")) put(block, "");
    }
    for (const [what, a, b, c] of run.events.slice(0, step)) {
      if (what === "Tile") mark([tileAt(a, b)], "done");
      else if (what === "Store" && (a === "S" || a === "P")) {
        tileAt(b, 0).classList.remove("S");
        mark([tileAt(b, 0)], "stored", a);
      } else if (what === "Store") {
        for (const block of at(a, b)) {
          if (block.matches(".times")) put(block, `${c}\u00d7`);
          else mark([block], "written");
        }
      }
    }
    run.held[step].forEach((n, k) => mark(at(run.names[k], n).filter((b) => b.matches(".block")), "in"));
    if (step) markEvent(stage, run.events[step - 1], tileAt, at, mark);
    const row = one(".lens-row", stage);
    row.setAttribute("transform", `translate(0 ${Number((now.row * Number(row.dataset.unit)).toFixed(2))})`);
  }

  function markEvent(stage, [what, a, b], tileAt, at, mark) {
    const beam = (axis, n) => mark(all(`.beam[data-${axis}="${n}"]`, stage), "on");
    if (what === "Tile") {
      mark([tileAt(a, b)], "now");
      beam("row", a);
      beam("col", b);
    } else if (what === "Make" || (what === "Store" && (a === "S" || a === "P"))) {
      mark([tileAt(b, 0)], "now");
    } else if (what !== "Launch") {
      mark(at(a, b).filter((block) => block.matches(".block")), what === "Store" ? "out" : "now");
      mark(at(a, b).filter((block) => block.matches(".times")), "on");
    }
  }

  // ---- The lens: one row of the order that is followed ----

  const blockOf = (event) => (event[0] === "Tile" ? event[1] : event[2]);

  // The events that changed the row, as [index, numbers].
  function visits() {
    const run = runOf(now.order);
    const block = Math.floor(now.row / run.grid.br);
    return Object.entries(run.numbers)
      .map(([at, numbers]) => [Number(at), numbers])
      .filter(([at]) => blockOf(run.events[at]) === block);
  }

  function drawLens() {
    const run = runOf(now.order);
    const step = stepOf(now.order);
    const seen = visits().filter(([at]) => at < step);
    const r = now.row % run.grid.br;
    put(one("[data-lens-title]"), `Row ${now.row} under the lens`);
    const draw = { standard: standardGlass, backward: backwardGlass }[now.order] ?? forwardGlass;
    const [says, glass] = draw(run, seen, r);
    put(one("[data-says]"), says);
    one("[data-glass]").innerHTML = glass;
    one('[data-row="-1"]').disabled = now.row === 0;
    one('[data-row="1"]').disabled = now.row === scene().n_q - 1;
    one('[data-visit="-1"]').disabled = target(-1) === null;
    one('[data-visit="1"]').disabled = target(1) === null;
  }

  function forwardGlass(run, seen, r) {
    const exact = scene().exact.out[now.row];
    if (!seen.length) {
      const state = stateList("Running state", [["m", number("-inf"), ""], ["factor", "\u2013", ""], ["l", number(0), ""]]);
      const sentence = record.sentences[visits().length ? "waiting" : "never"];
      return [fill(sentence, { row: now.row }), glass("", state, bars(exact.map(() => 0), exact), fall(seen, r))];
    }
    const [at, x] = seen[seen.length - 1];
    const from = run.events[at][2] * run.grid.bc;
    const rows = x.S[r].map((s, n) => [from + n, s, x.P[r][n]]);
    const values = { row: now.row, key: x.key[r], m: number(x.m[r]), m_old: number(x.m_old[r]), factor: number(x.factor[r]) };
    const state = stateList("Running state", [
      ["m", values.m, `was ${values.m_old}`],
      ["factor", values.factor, `exp(${values.m_old} \u2212 ${values.m})`],
      ["l", number(x.l[r]), `was ${number(x.l_old[r])}`],
    ]);
    const top = x.case[r] === "bigger" || x.case[r] === "first" ? x.key[r] : null;
    const table = keyTable(["key", "S", "exp(S \u2212 m)"], rows, top);
    return [fill(record.sentences[x.case[r]], values), glass(table, state, bars(x.out[r], exact), fall(seen, r))];
  }

  function backwardGlass(run, seen, r) {
    const exact = scene().exact.dq[now.row];
    if (!seen.length) {
      const bare = bars(exact.map(() => 0), exact);
      const sentence = record.sentences[visits().length ? "no_gradient" : "never"];
      return [fill(sentence, { row: now.row }), glass("", stateList("", []), bare, fall(seen, r))];
    }
    const [at, x] = seen[seen.length - 1];
    const from = run.events[at][2] * run.grid.bc;
    const rows = x.S[r].map((s, n) => [from + n, s, x.P[r][n], x.dS[r][n]]);
    const values = { row: now.row, L: number(x.L[r]), sum: number(x.sum[r]) };
    const state = stateList("Statistics of the row", [["L", values.L, ""], ["D", number(x.D[r]), "rowsum(dO \u00b7 O)"], ["\u03a3 P", values.sum, "so far, recomputed"]]);
    const table = keyTable(["key", "S", "exp(S \u2212 L)", "dS"], rows, null);
    return [fill(record.sentences[x.case[r]], values), glass(table, state, bars(x.out[r], exact), fall(seen, r))];
  }

  function standardGlass(run, seen, r) {
    const exact = scene().exact.out[now.row];
    const made = Object.fromEntries(seen.map(([at, x]) => [run.events[at][1], x]));
    const latest = seen.length ? run.events[seen[seen.length - 1][0]][1] : "none";
    const row = made.P ? made.P.P[r] : null;
    const columns = row
      ? `<h4>P, all ${row.length} weights of the row</h4><div class="columns" role="img" aria-label="Weights of the row">${row
          .map((p) => `<i style="height:${percent(p, Math.max(...row) || 1)}"></i>`).join("")}</div>`
      : made.S
        ? `<h4>S, all ${made.S.S[r].length} scores of the row</h4><p class="numbers">${made.S.S[r].map((s) => `<span>${number(s)}</span>`).join("")}</p>`
        : "";
    const state = stateList("Running state", [["m, l", "\u2013", "none: the row is whole"]]);
    const out = made.O ? made.O.out[r] : exact.map(() => 0);
    const falls = fall(seen.filter(([, x]) => x.error), r);
    return [fill(record.sentences[latest], { row: now.row, n: scene().n_k }), glass(columns, state, bars(out, exact), falls)];
  }

  const glass = (table, state, outBars, falls) =>
    [table, state, outBars, falls].map((part) => `<div>${part}</div>`).join("");

  function keyTable(head, rows, top) {
    const line = ([key, s, p, ...more]) =>
      `<tr${key === top ? ' class="top"' : ""}><td>${key}</td><td>${number(s)}</td><td>${number(p)}</td>` +
      `${more.map((x) => `<td>${number(x)}</td>`).join("")}<td class="weight"><i style="width:${percent(p, 1)}"></i></td></tr>`;
    return `<h4>Keys ${rows[0][0]} to ${rows[rows.length - 1][0]}</h4><table><thead><tr>${head.map((name) => `<th scope="col">${name}</th>`).join("")}<td></td></tr></thead>` +
      `<tbody>${rows.map(line).join("")}</tbody></table>`;
  }

  const stateList = (title, rows) =>
    rows.length
      ? `<h4>${title}</h4><dl class="state">${rows.map(([name, x, note]) => `<dt>${name}</dt><dd>${x} <small>${note}</small></dd>`).join("")}</dl>`
      : "";

  // Bars start from 0 in the middle; the mark is the exact answer.
  function bars(out, exact) {
    const reach = scene().reach[pass()][now.row] || 1;
    const place = (x) => percent(x + reach, 2 * reach);
    const bar = (x, n) =>
      `<div><span class="axis-bar"><i style="left:${place(Math.min(x, 0))};width:${percent(Math.abs(x), 2 * reach)}"></i>` +
      `<b style="left:${place(exact[n])}"></b></span><span>${number(x)}</span></div>`;
    const name = pass() === "backward" ? "dQ" : now.order === "standard" ? "O" : "O / l";
    return `<h4>${name}</h4><div class="bars">${out.map(bar).join("")}</div><p class="note"><i></i>the exact answer</p>`;
  }

  // The error of the row before its first tile and after each tile; later ones are hollow.
  function fall(seen, r) {
    const [steps, start] = [visits().filter(([, x]) => x.error), scene().start[pass()][now.row]];
    const highest = Math.max(start, scene().worst[pass()][now.row]) || 1;
    const place = (n, err) => [6 + (188 * n) / (steps.length || 1), 62 - (56 * err) / highest].map((x) => x.toFixed(1));
    const dots = [place(0, start), ...steps.map(([, x], n) => place(n + 1, x.error[r]))];
    const reached = dots.slice(0, seen.length + 1);
    const circle = ([x, y], n) => `<circle${n < reached.length ? ' class="seen"' : ""} cx="${x}" cy="${y}" r="3"/>`;
    const latest = error(seen.length ? seen[seen.length - 1][1].error[r] : start);
    return `<h4>Largest error of the row</h4><div class="fall"><b>${latest}</b><svg viewBox="0 0 200 68" role="img" ` +
      `aria-label="Error after each tile of the row, now ${latest}"><line x1="0" x2="200" y1="62" y2="62"/>` +
      `<polyline points="${reached.map((dot) => dot.join(",")).join(" ")}"/>${dots.map(circle).join("")}</svg></div>`;
  }

  // ---- The whole ----

  function draw() {
    for (const article of all(".scene")) article.hidden = article.dataset.scene !== now.scene;
    const article = one(`.scene[data-scene="${now.scene}"]`);
    for (const part of all(".pass", article)) part.hidden = part.dataset.pass !== pass();
    all(`.pass[data-pass="${pass()}"] .panel[data-order]`, article).forEach(drawPanel);
    put(one("[data-cuts]", article), fill(record.sentences.cuts, {
      row: now.row,
      cuts: scene().cuts[Math.floor(now.row / scene().br)].map((cut) => fill(record.sentences.cut, cut)).join("; "),
    }));
    drawLens();
    const scrub = one("[data-scrub]");
    scrub.max = frames().length - 1;
    scrub.value = now.step;
    const own = stepOf(now.order);
    const bytes = count(Math.max(...orders().map((order) => runOf(order).counts[stepOf(order)][0])));
    const position = `event ${own} of ${runOf(now.order).events.length}, ${bytes} B on the clock`;
    put(one("[data-readout]"), position);
    scrub.setAttribute("aria-valuetext", position);
    one(`input[name="scene"][value="${now.scene}"]`).checked = true;
    one(`input[name="pass"][value="${pass()}"]`).checked = true;
    const playing = timer !== null;
    root.classList.toggle("playing", playing);
    one('[data-do="play"]').setAttribute("aria-label", playing ? "Pause" : "Play");
    one("[data-says]").setAttribute("aria-live", playing ? "off" : "polite");
  }

  const link = () => `#viewer/${now.scene}/${now.order}/${now.step}/${now.row}`;

  // The address follows a moment later: browsers limit how often it may change.
  function note() {
    clearTimeout(noting);
    noting = timer === null ? setTimeout(() => history.replaceState(null, "", link()), 150) : null;
  }

  function set(change) {
    if (change.scene && change.scene !== now.scene) Object.assign(now, { step: 0, row: scenes[change.scene].row });
    if (change.order && change.order !== now.order) now.step = sameMoment(change.order, change.scene ?? now.scene);
    Object.assign(now, change);
    now.step = clamp(now.step, 0, frames().length - 1);
    now.row = clamp(now.row, 0, scene().n_q - 1);
    draw();
    note();
  }

  // The frame of another order that shows about the same moment of the clock.
  function sameMoment(order, name) {
    if (order === "backward" || now.order === "backward" || !now.scene || name !== now.scene) return 0;
    const own = scenes[name].frames[now.order][now.step][SIDE_BY_SIDE.indexOf(order)];
    return scenes[name].frames[order].findIndex((frame) => frame[SIDE_BY_SIDE.indexOf(order)] === own);
  }

  // The frame in which the row meets its next or previous tile; null if there is none.
  function target(way) {
    const step = stepOf(now.order);
    const found = visits().map(([at]) => at + 1).filter((at) => (way > 0 ? at > step : at < step));
    if (!found.length) return null;
    const at = way > 0 ? found[0] : found[found.length - 1];
    return frames().findIndex((frame) => frame[orders().indexOf(now.order)] === at);
  }

  function pause() {
    clearInterval(timer);
    timer = null;
  }

  function play() {
    pause();
    if (now.step === frames().length - 1) now.step = 0;
    timer = setInterval(() => {
      if (now.step >= frames().length - 2) pause();
      set({ step: now.step + 1 });
    }, 1000 / FRAMES_PER_SECOND / Number(one("[data-speed]").value));
    draw();
  }

  const go = (step) => { pause(); set({ step }); };
  const doing = {
    first: () => go(0),
    back: () => go(now.step - 1),
    play: () => { if (timer === null) play(); else { pause(); set({}); } },
    step: () => go(now.step + 1),
    last: () => go(frames().length - 1),
    up: () => set({ row: now.row - 1 }),
    down: () => set({ row: now.row + 1 }),
  };
  const KEYS = { " ": "play", ArrowLeft: "back", ArrowRight: "step", Home: "first", End: "last", ArrowUp: "up", ArrowDown: "down" };

  function onKey(event) {
    const name = KEYS[event.key];
    if (!name || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("select, input[type=radio]")) return; // these use the keys themselves
    if (event.key === " " && event.target.matches("button")) return;
    event.preventDefault();
    doing[name]();
  }

  // A click on S puts that row under the lens.
  function onStage(event) {
    const row = one(".lens-row", event.currentTarget);
    if (!row || !event.target.matches(".tile")) return;
    const { y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(event.currentTarget.getScreenCTM().inverse());
    set({ row: Math.floor((y - Number(row.getAttribute("y"))) / Number(row.dataset.unit)) });
  }

  // A link to a moment: #viewer/scene/order/step/row, as far as it is given.
  function read() {
    const [place, name, order, step, row] = location.hash.slice(1).split("/");
    if (place !== "viewer" || !scenes[name]) return false;
    Object.assign(now, { scene: name, row: scenes[name].row, order: scenes[name].frames[order] ? order : "fa2" });
    const whole = (text, other) => (/^\d+$/.test(text ?? "") ? Number(text) : other);
    set({ step: whole(step, 0), row: whole(row, now.row) });
    return true;
  }

  // ---- Would the tile fit? ----

  function drawFit() {
    const room = record.fit.rooms.find((each) => each.name === one("[data-gpu]").value);
    const dim = Number(one('input[name="dim"]:checked').value);
    for (const group of all(".needs")) {
      group.hidden = Number(group.dataset.dim) !== dim;
      for (const mark of all("[data-room]", group)) mark.style.left = percent(room.bytes, Number(group.dataset.most));
    }
    for (const need of record.fit.needs) {
      const line = one(`.needs[data-dim="${need.dim}"] [data-tile="${need.br}x${need.bc}"]`);
      line.classList.toggle("over", !need.fits[room.name]);
      put(one("[data-verdict]", line), need.fits[room.name] ? "fits" : "does not fit");
    }
    put(one("[data-room-name]"), room.title);
    put(one("[data-room-size]"), size(room.bytes));
  }

  // ---- Start ----

  root.classList.add("live");
  all("[data-live]").forEach((part) => { part.hidden = false; });
  all(".follow").forEach((button) => {
    button.disabled = false;
    button.addEventListener("click", () => { pause(); set({ order: button.dataset.follow }); });
  });
  all("[data-do]").forEach((button) => button.addEventListener("click", () => doing[button.dataset.do]()));
  all("[data-row][type=button]").forEach((b) => b.addEventListener("click", () => set({ row: now.row + Number(b.dataset.row) })));
  all("[data-visit]").forEach((b) => b.addEventListener("click", () => go(target(Number(b.dataset.visit)))));
  all('input[name="scene"]').forEach((i) => i.addEventListener("change", () => { pause(); set({ scene: i.value }); }));
  all('input[name="pass"]').forEach((i) =>
    i.addEventListener("change", () => { pause(); set({ order: i.value === "backward" ? "backward" : "fa2" }); }));
  one("[data-scrub]").addEventListener("input", (event) => go(Number(event.target.value)));
  one("[data-speed]").addEventListener("change", () => { if (timer !== null) play(); });
  root.addEventListener("keydown", onKey);
  all(".stage").forEach((stage) => stage.addEventListener("click", onStage));
  all(".choices").forEach((form) => form.addEventListener("submit", (event) => event.preventDefault()));
  one("[data-gpu]").addEventListener("change", drawFit);
  all('input[name="dim"]').forEach((i) => i.addEventListener("change", drawFit));
  window.addEventListener("hashchange", read);
  drawFit();
  if (read()) {
    root.scrollIntoView();
    one("[data-keys]").focus({ preventScroll: true });
  } else {
    const first = scenes.causal ?? record.scenes[0];
    Object.assign(now, { scene: first.name, row: first.row });
    draw();
  }
})();
