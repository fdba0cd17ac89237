"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;
  const tip = byId("tip");
  const HEIGHT = 230;
  const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

  // The colours depend on light, dark and print.
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const colour = (run) => css(`--c${run % 7}`);

  const hiddenRuns = new Set();
  const off = new Set(); // runs whose chip is off
  let smoothing = 0;
  let log = false;

  // All charts have one x axis, so that device figures stand beside the training curves.
  const ends = data.charts.flatMap((c) =>
    c.series.flatMap((s) => [[s.run, s.x[0]], [s.run, s.x[s.x.length - 1]]]));
  let axis = Object.keys(data.axes)[0];
  let first, last, view, unit;

  // The value of an axis at a step of a run, between the knots that the page has.
  function valueAt(name, run, step) {
    if (name === "step") return step;
    const [steps, values] = data.axes[name][run];
    let low = 0, high = steps.length - 1;
    if (!high) return values[0];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle;
      else high = middle;
    }
    const slope = (values[high] - values[low]) / (steps[high] - steps[low]);
    return Math.max(0, values[low] + slope * (step - steps[low]));
  }

  function setAxis(name) {
    axis = name;
    first = Infinity;
    last = -Infinity;
    for (const [run, step] of ends) {
      const x = valueAt(name, run, step);
      if (x < first) first = x;
      if (x > last) last = x;
    }
    if (first === Infinity) first = last = 0;
    unit = name !== "time" ? 1 : last > 3 * 3600 ? 3600 : last > 180 ? 60 : 1;
    first /= unit;
    last /= unit;
    if (first === last) last = first + 1;
    view = [first, last];
    for (const c of data.charts) {
      for (const s of c.series) s.at = s.x.map((step) => valueAt(name, s.run, step) / unit);
    }
  }
  const axisName = () => (axis === "time" ? `time (${{ 1: "s", 60: "min", 3600: "h" }[unit]})` : axis);
  setAxis(axis);

  const SI = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  function format(value, digits = 5) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-4 || size >= 1e15) return value.toExponential(Math.max(digits - 3, 0)).replace(/\.?0+e/, "e");
    if (size >= 1e4) {
      for (const [unit, letter] of SI) {
        if (size >= unit) return `${Number((value / unit).toPrecision(digits))}${letter}`;
      }
    }
    return String(Number(value.toPrecision(digits)));
  }

  // An exponential moving average with TensorBoard's correction of the beginning.
  function smooth(values) {
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return value;
      mean = smoothing * mean + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return mean / weight;
    });
  }

  const drawable = (value) => (log && value != null && value <= 0 ? null : value);

  // Returns uPlot's columns: steps, then for each run its curve, least, greatest, and smooth curve.
  function columns(chart) {
    const tables = chart.series.map((s) => {
      const y = s.y.map(drawable);
      const empty = y.map(() => null);
      const [lo, hi] = s.lo && !smoothing ? [s.lo.map(drawable), s.hi.map(drawable)] : [empty, empty];
      return [s.at, y, lo, hi, smoothing ? smooth(y) : empty];
    });
    return uPlot.join(tables);
  }

  // Shades the area from the least to the greatest of the values that one point stands for.
  function drawBands(u, chart) {
    const { ctx } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    ctx.clip();
    ctx.globalAlpha = 0.16;
    chart.series.forEach((s, i) => {
      if (!s.lo || smoothing || hiddenRuns.has(s.run)) return;
      const [x, lo, hi] = [u.data[0], u.data[4 * i + 2], u.data[4 * i + 3]];
      const at = (k, y) => [u.valToPos(x[k], "x", true), u.valToPos(y[k], "y", true)];
      ctx.fillStyle = colour(s.run);
      let part = [];
      const fill = () => {
        ctx.beginPath();
        for (const k of part) ctx.lineTo(...at(k, hi));
        for (const k of part.reverse()) ctx.lineTo(...at(k, lo));
        ctx.fill();
        part = [];
      };
      for (let k = 0; k < x.length; k++) {
        if (hi[k] != null && lo[k] != null) part.push(k);
        else if (hi[k] === null) fill(); // a gap; undefined is a step of another run
      }
      fill();
    });
    ctx.restore();
  }

  // The index of the value nearest to the cursor: runs have values at different steps. Null if a run
  // has none near it, as after its end.
  function nearest(u, column, index) {
    const [x, y] = [u.data[0], u.data[column]];
    const most = (view[1] - view[0]) / 30;
    for (let far = 0; far < x.length; far++) {
      const near = [index - far, index + far].filter((k) => Math.abs(x[k] - x[index]) <= most);
      if (!near.length) return null;
      const found = near.find((k) => y[k] != null);
      if (found != null) return found;
    }
    return null;
  }

  function showTip(u, chart) {
    const index = u.cursor.idx;
    if (index == null || !u.over.matches(":hover")) {
      if (tip.owner === u) tip.hidden = true;
      return;
    }
    const rows = [];
    const add = (left, right, run) => {
      const row = document.createElement("div");
      const [name, value] = [document.createElement("span"), document.createElement("b")];
      name.textContent = left;
      value.textContent = right;
      if (run != null) {
        const swatch = document.createElement("span");
        swatch.className = `swatch r${run % 7}`;
        name.prepend(swatch);
      }
      row.append(name, value);
      rows.push(row);
    };
    add(axisName(), u.data[0][index].toLocaleString("en", { maximumFractionDigits: 2 }));
    chart.series.forEach((s, i) => {
      if (hiddenRuns.has(s.run)) return;
      const k = nearest(u, 4 * i + 1, index);
      if (k == null) return;
      const y = u.data[4 * i + 1][k];
      const [lo, hi] = [u.data[4 * i + 2][k], u.data[4 * i + 3][k]];
      const range = lo != null && lo !== hi ? ` (${format(lo)} to ${format(hi)})` : "";
      const smoothed = smoothing ? ` ~ ${format(u.data[4 * i + 4][k])}` : "";
      add(data.runs[s.run], `${format(y)}${smoothed}${range}`, s.run);
    });
    tip.replaceChildren(...rows);
    tip.owner = u;
    tip.hidden = false;
    const box = u.over.getBoundingClientRect();
    const { width, height } = tip.getBoundingClientRect();
    const x = box.left + u.cursor.left;
    const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
    const top = Math.min(box.top + u.cursor.top + 12, innerHeight - height - 8);
    tip.style.transform = `translate(${Math.max(left, 4)}px, ${Math.max(top, 4)}px)`;
  }

  const made = new Map(); // index of a chart -> uPlot

  function zoom(range) {
    if (range[0] === view[0] && range[1] === view[1]) return;
    view = range;
    byId("reset").hidden = view[0] === first && view[1] === last;
    for (const u of made.values()) u.setScale("x", { min: view[0], max: view[1] });
  }

  function make(figure) {
    const number = Number(figure.dataset.chart);
    const chart = data.charts[number];
    const home = figure.querySelector(".plot");
    made.get(number)?.destroy();
    const line = (s, alpha) => ({
      stroke: () => colour(s.run) + alpha,
      width: 1.6,
      dash: DASHES[Math.floor(s.run / 7) % DASHES.length],
      show: !hiddenRuns.has(s.run),
      points: { size: 5, fill: () => colour(s.run) + alpha },
    });
    const none = { show: false };
    // Not drawn, but the y axis includes its values.
    const bound = (s) => ({ show: !hiddenRuns.has(s.run), paths: () => null, points: none });
    const label = { labelSize: 18, labelGap: 0, labelFont: "11px system-ui, sans-serif" };
    const shared = {
      ...label,
      stroke: () => css("--muted"),
      grid: { stroke: () => css("--line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const labels = (u, ticks) => ticks.map((v) => format(v, 4));
    const u = new uPlot(
      {
        width: home.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        padding: [8, 8, 0, 0],
        scales: {
          x: { time: false, range: (u, min, max) => [min, max] },
          y: { distr: log ? 3 : 1 },
        },
        axes: [
          { ...shared, label: axisName(), size: 28, values: labels },
          { ...shared, label: chart.unit ? `${chart.name} (${chart.unit})` : chart.name, gap: 6, values: labels,
            size: (u, ticks) => Math.max(36, ...(ticks || []).map((t) => String(t ?? "").length * 7 + 12)) },
        ],
        series: [{}, ...chart.series.flatMap((s) => smoothing
          ? [{ ...line(s, "44"), points: none }, none, none, { ...line(s, ""), points: none }]
          : [line(s, ""), bound(s), bound(s), none])],
        cursor: {
          y: false,
          sync: { key: "step", setSeries: false, scales: ["x", null],
            filters: { pub: (type) => type !== "mousedown" && type !== "mouseup" && type !== "dblclick" } },
          drag: { x: true, y: false, setScale: true },
          dataIdx: (u, column, index) => (column === 0 ? index : nearest(u, column, index)),
          points: { size: (u, column) => (column % 4 === 1 ? 7 : 0),
            fill: (u, column) => colour(chart.series[Math.floor((column - 1) / 4)].run) },
          bind: { dblclick: () => () => zoom([first, last]) },
        },
        hooks: {
          drawAxes: [(u) => drawBands(u, chart)],
          setCursor: [(u) => showTip(u, chart)],
          setScale: [(u, key) => {
            if (key === "x" && made.get(number) === u) zoom([u.scales.x.min, u.scales.x.max]);
          }],
        },
      },
      columns(chart),
      home,
    );
    u.setScale("x", { min: view[0], max: view[1] });
    made.set(number, u);
  }

  const figures = [...document.querySelectorAll(".chart")];
  function redraw() {
    tip.hidden = true;
    figures.filter((figure) => made.has(Number(figure.dataset.chart))).forEach(make);
  }

  // A page may have hundreds of charts: those below the window are made when they come into view.
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && !made.has(Number(target.dataset.chart))) make(target);
    }
  }, { rootMargin: "300px" });
  for (const figure of figures) {
    if (figure.getBoundingClientRect().top < innerHeight) make(figure);
    else seen.observe(figure);
  }

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar changes only the height
    width = innerWidth;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    root.dataset.print = "";
    figures.forEach(make);
  });
  addEventListener("afterprint", () => {
    delete root.dataset.print;
    redraw();
  });

  byId("controls").hidden = false;
  const on = (id, type, action) => byId(id)?.addEventListener(type, action);
  on("axis", "change", (event) => {
    setAxis(event.target.value);
    byId("reset").hidden = true;
    redraw();
  });
  on("smoothing", "input", (event) => {
    smoothing = Number(event.target.value);
    redraw();
  });
  on("log", "change", (event) => {
    log = event.target.checked;
    redraw();
  });
  on("reset", "click", () => zoom([first, last]));

  const has = (name, input) => name.toLowerCase().includes((input?.value || "").toLowerCase());
  on("filter", "input", () => {
    for (const part of document.querySelectorAll("[data-metric]")) {
      part.hidden = !has(part.dataset.metric, byId("filter"));
    }
    for (const section of document.querySelectorAll(".curves")) {
      section.hidden = !section.querySelector(".chart:not([hidden])");
    }
  });

  // A run is shown if its chip is on and the filter finds its name: in curves, tables and images.
  function showRuns() {
    hiddenRuns.clear();
    data.runs.forEach((name, run) => {
      if (off.has(run) || !has(name, byId("runs"))) hiddenRuns.add(run);
    });
    for (const part of document.querySelectorAll("[data-run]")) {
      part.hidden = hiddenRuns.has(Number(part.dataset.run));
    }
    redraw();
  }
  on("runs", "input", () => {
    for (const chip of document.querySelectorAll(".chip")) {
      chip.hidden = !has(data.runs[Number(chip.dataset.chip)], byId("runs"));
    }
    showRuns();
  });
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const run = Number(chip.dataset.chip);
      const shown = off.delete(run);
      if (!shown) off.add(run);
      chip.setAttribute("aria-pressed", String(shown));
      showRuns();
    });
  }

  // Images open large, those of all runs side by side, with a slider over their steps.
  const large = byId("large");
  let strips = [], steps = [];
  function showStep() {
    const step = steps[Number(byId("steps").value)];
    byId("step").textContent = `step ${step.toLocaleString("en")}`;
    for (const strip of strips) {
      const shown = strip.items.findLast((item) => item.step <= step) || strip.items[0];
      strip.img.src = shown.src;
      strip.img.alt = `${strip.name}, step ${shown.step}`;
      strip.img.className = shown.width < 300 ? "small" : "";
      const late = shown.step === step ? "" : `step ${shown.step.toLocaleString("en")}`;
      strip.caption.textContent = [data.runs.length > 1 ? strip.name : "", late].filter(Boolean).join(" · ");
    }
  }
  function enlarge(button) {
    const article = button.closest(".media");
    strips = [...article.querySelectorAll(".strip:not([hidden])")].map((strip) => {
      const items = [...strip.querySelectorAll(".enlarge")].map((one) => {
        const img = one.querySelector("img");
        return { step: Number(one.dataset.step), src: img.src, width: img.naturalWidth };
      }).sort((a, b) => a.step - b.step);
      const [figure, img, caption] = ["figure", "img", "figcaption"].map((name) => document.createElement(name));
      caption.className = "muted";
      figure.append(img, caption);
      return { name: data.runs[Number(strip.dataset.run)], items, figure, img, caption };
    }).filter((strip) => strip.items.length);
    steps = [...new Set(strips.flatMap((strip) => strip.items.map((item) => item.step)))].sort((a, b) => a - b);
    byId("large-name").textContent = article.dataset.metric;
    large.querySelector(".views").replaceChildren(...strips.map((strip) => strip.figure));
    byId("steps").max = steps.length - 1;
    byId("steps").value = steps.indexOf(Number(button.dataset.step));
    byId("steps").parentElement.hidden = steps.length < 2;
    showStep();
    large.showModal();
    byId("steps").focus();
  }
  for (const button of document.querySelectorAll(".enlarge")) {
    button.addEventListener("click", () => enlarge(button));
  }
  on("steps", "input", showStep);
  on("close", "click", () => large.close());
  large.addEventListener("click", (event) => {
    if (event.target === large) large.close(); // outside of its content
  });
})();
