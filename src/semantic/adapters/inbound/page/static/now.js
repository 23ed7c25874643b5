// Now: waiting and running requests, and latencies and rates of the last hour.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { get, known, listen, usePolling, useTopics } from "./server.js";
import { Bar, ReuseBar, ago, number, percent, seconds, short } from "./parts.js";

const HOUR_S = 3600;
const WINDOW_S = 60; // quantiles cover this many seconds
const history = { at: [], series: {} };

// -- readings ----------------------------------------------------------------------------------

async function refreshHistory() {
  const last = history.at.at(-1) ?? 0;
  const more = await get(`metrics/history?since=${last}`);
  if (more.at.length && last && more.at[0] < last) history.at.length = 0;
  const before = history.at.length;
  history.at.push(...more.at);
  for (const [name, values] of Object.entries(more.series)) {
    const kept = (history.series[name] ??= []);
    kept.length = Math.min(kept.length, before);
    while (kept.length < before) kept.push(null);
    kept.push(...values);
  }
  const old = history.at.findIndex((at) => at > (history.at.at(-1) ?? 0) - HOUR_S - WINDOW_S);
  if (old > 0) {
    history.at.splice(0, old);
    for (const values of Object.values(history.series)) values.splice(0, old);
  }
}

const valueAt = (name, index) => history.series[name]?.[index] ?? 0;

/** Increase of a counter per second, at each reading. */
function rate(name) {
  return history.at.map((at, index) => {
    if (!index) return null;
    const grown = valueAt(name, index) - valueAt(name, index - 1);
    return grown < 0 ? null : grown / (at - history.at[index - 1]);
  });
}

const gauge = (name) => history.at.map((_, index) => valueAt(name, index));

/** A quantile of a histogram over the last WINDOW_S, at each reading; null if nothing was observed. */
function quantile(name, share) {
  const prefix = `${name}_bucket{le="`;
  const buckets = Object.keys(history.series)
    .filter((key) => key.startsWith(prefix))
    .map((key) => ({ key, le: Number(key.slice(prefix.length, -2).replace("+Inf", "Infinity")) }))
    .sort((a, b) => a.le - b.le);
  let start = 0;
  return history.at.map((at, index) => {
    while (history.at[start] < at - WINDOW_S) start++;
    const grown = buckets.map(({ key }) => valueAt(key, index) - valueAt(key, Math.max(0, start - 1)));
    const total = grown.at(-1);
    if (!(total > 0)) return null;
    const wanted = share * total;
    const found = grown.findIndex((count) => count >= wanted);
    const low = found ? buckets[found - 1].le : 0;
    const high = buckets[found].le;
    if (!Number.isFinite(high)) return low;
    const below = found ? grown[found - 1] : 0;
    return low + ((high - low) * (wanted - below)) / (grown[found] - below || 1);
  });
}

const TTFT = "semantic_time_to_first_token_seconds";
const ITL = "semantic_inter_token_latency_seconds";
const reused = (tier) => `semantic_tokens_reused_total{tier="${tier}"}`;

const CHARTS = [
  {
    title: "Tokens per second",
    lines: [
      ["replies", "--accent", () => rate("semantic_tokens_generated_total")],
      ["computed prompts", "--computed", () => rate("semantic_tokens_prefilled_total")],
    ],
    show: (value) => short(value),
  },
  {
    title: "Time to first token",
    lines: [
      ["median", "--disk", () => quantile(TTFT, 0.5)],
      ["95 % within", "--hot", () => quantile(TTFT, 0.95)],
    ],
    show: seconds,
  },
  {
    title: "Time between tokens",
    lines: [
      ["median", "--disk", () => quantile(ITL, 0.5)],
      ["95 % within", "--hot", () => quantile(ITL, 0.95)],
    ],
    show: seconds,
  },
  {
    title: "Prompt tokens per second: reused or computed",
    isStacked: true,
    lines: [
      ["still open", "--hot", () => rate(reused("hot"))],
      ["from memory", "--pool", () => rate(reused("pool"))],
      ["from disk", "--disk", () => rate(reused("disk"))],
      ["computed", "--computed", () => rate("semantic_tokens_prefilled_total")],
    ],
    show: (value) => short(value),
  },
  {
    title: "Requests",
    lines: [
      ["running", "--accent", () => gauge("semantic_requests_running")],
      ["waiting", "--hot", () => gauge("semantic_request_queue_depth")],
    ],
    show: (value) => number(value),
  },
];

// -- plots -------------------------------------------------------------------------------------

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function stacked(lines) {
  const sums = lines[0].map(() => 0);
  return lines.map((line) => line.map((value, index) => (sums[index] += value ?? 0)));
}

function dataOf(chart) {
  const lines = chart.lines.map(([, , read]) => read());
  return [history.at, ...(chart.isStacked ? stacked(lines).reverse() : lines)];
}

function makePlot(chart, box, width) {
  const faint = { stroke: colour("--faint"), grid: { stroke: colour("--edge"), width: 1 }, ticks: { show: false } };
  const order = chart.isStacked ? [...chart.lines].reverse() : chart.lines;
  const series = order.map(([label, name]) => ({
    label,
    stroke: colour(name),
    width: chart.isStacked ? 0 : 1.5,
    fill: chart.isStacked ? colour(name) : `color-mix(in srgb, ${colour(name)} 9%, transparent)`,
    points: { show: false },
    spanGaps: false,
  }));
  const axis = { ...faint, size: 52, values: (_, splits) => splits.map((value) => chart.show(value)), space: 28, font: "11px system-ui" };
  return new uPlot(
    {
      width,
      height: 150,
      legend: { show: false },
      cursor: { sync: { key: "now" }, points: { size: 6 }, y: false },
      scales: { x: { time: true, range: () => xRange() }, y: { range: (_, low, high) => [0, Math.max(high * 1.15, 1e-9)] } },
      axes: [{ ...faint, size: 26, space: 60, font: "11px system-ui", values: (_, splits) => splits.map(clock) }, axis],
      series: [{}, ...series],
    },
    dataOf(chart),
    box,
  );
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

function xRange() {
  const last = history.at.at(-1) ?? Date.now() / 1000;
  const first = history.at[0] ?? last - 60;
  return [Math.max(last - HOUR_S, Math.min(first, last - 300)), last];
}

function Chart({ chart, beat }) {
  const box = useRef();
  const plot = useRef();
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      plot.current = makePlot(chart, box.current, box.current.clientWidth);
    };
    make();
    const observer = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: 150 }));
    observer.observe(box.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    const unlisten = listen(["theme"], make);
    return () => {
      observer.disconnect();
      scheme.removeEventListener("change", make);
      unlisten();
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(dataOf(chart)), [beat]);
  return html`<figure class="chart">
    <figcaption><b>${chart.title}</b>
      <span class="key">${chart.lines.map(([label, name, read]) => {
        const latest = read().findLast((value) => value !== null);
        return html`<span><i class="dot" style=${{ background: `var(${name})` }} />${label} ${latest === undefined ? "–" : chart.show(latest)}</span>`;
      })}</span>
    </figcaption>
    <div ref=${box} class="plot" />
  </figure>`;
}

// -- the view ----------------------------------------------------------------------------------

const latest = (values) => values.at(-1) ?? 0;
const lastKnown = (values) => values.findLast((value) => value !== null);

export function Now({ go }) {
  useTopics("cache", "events");
  const [beat, setBeat] = useState(0);
  const [fault, setFault] = useState("");
  const [running, setRunning] = useState([]);
  usePolling(async () => {
    try {
      await refreshHistory();
      setFault("");
    } catch (error) {
      setFault(error.status === 403 ? error.message : "");
    }
    setBeat((count) => count + 1);
  }, 5000);
  usePolling(async () => setRunning((await get("v1/running")).data), 1000);
  const cache = known.cache;
  const waiting = running.filter((reply) => reply.state === "queued").length;
  return html`<section class="now">
    <header class="tools"><h1>Now</h1></header>
    <div class="figures">
      <${Figure} name="running" value=${running.length - waiting} />
      <${Figure} name="waiting" value=${waiting} />
      <${Figure} name="tokens/s" value=${short(latest(rate("semantic_tokens_generated_total")) ?? 0)} />
      <${Figure} name="to the first token" value=${seconds(lastKnown(quantile(TTFT, 0.5)))} note=${`median; 95 % within ${seconds(lastKnown(quantile(TTFT, 0.95)))}`} />
      <${Figure} name="between tokens" value=${seconds(lastKnown(quantile(ITL, 0.5)))} note=${`median; 95 % within ${seconds(lastKnown(quantile(ITL, 0.95)))}`} />
      <${Figure} name="of prompts reused" value=${percent(cache?.hit_rates.all)} note=${cache ? `${short(cache.replies)} replies` : ""} />
    </div>
    ${fault && html`<p class="fault">${fault}</p>`}
    <div class="columns">
      <div class="panel">
        <h2>Waiting and running requests</h2>
        ${running.length ? running.map((reply) => html`<${Running} key=${reply.turn_id} reply=${reply} go=${go} />`) : html`<p class="note">No requests are waiting or running.</p>`}
      </div>
      <div class="panel">
        <h2>Activity</h2>
        <${Events} />
      </div>
    </div>
    ${history.at.length > 0 && html`<div class="charts">${CHARTS.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} beat=${beat} />`)}</div>`}
  </section>`;
}

const Figure = ({ name, value, note }) =>
  html`<div class="figure"><b>${value}</b><span>${name}</span>${note && html`<small>${note}</small>`}</div>`;

function Running({ reply, go }) {
  const { state, prompt_tokens: prompt, computed_tokens: computed, reused_tokens: reused, generated_tokens: generated, max_tokens: most } = reply;
  const isPrompt = state !== "decoding";
  const parts = isPrompt ? [["pool", reused], ["computed", Math.max(0, computed - reused)]] : [["accent", generated]];
  const text = { queued: "waiting", prefill: `prompt ${number(computed)} of ${number(prompt)}`, decoding: `${number(generated)} of at most ${number(most)} tokens` };
  return html`<a class="running" href=${`#/chat/${reply.agent_id}`}>
    <span class="name">${reply.agent_id}</span><span class="note">${text[state]}, ${seconds(reply.age_s)}</span>
    <${Bar} parts=${parts} whole=${isPrompt ? prompt : most} label=${text[state]} />
  </a>`;
}

const SAID = {
  "turn.started": (event) => `request, ${number(event.prompt_tokens)} prompt tokens`,
  "turn.finished": (event) => (event.reason === "failed" ? "failed" : `reply, ${number(event.usage.completion_tokens)} tokens`),
  missed: (event) => `missed ${event.events} events`,
};

function Events() {
  const events = known.events.slice(0, 40);
  if (!events.length) return html`<p class="note">No events since you opened this page.</p>`;
  return html`<ol class="events">
    ${events.map((event) => html`<li key=${`${event.at}${event.type}${event.agent_id}`}>
      <time>${ago(event.at / 1000)}</time>
      ${event.agent_id && html`<a href=${`#/agents/${event.agent_id}`}>${event.agent_id}</a>`}
      <span>${SAID[event.type]?.(event) ?? event.type.replace("agent.", "").replace("model.", "model ")}${event.model ? `: ${event.model}` : ""}</span>
      ${event.reuse && html`<${ReuseBar} reuse=${event.reuse} hasText=${false} />`}
    </li>`)}
  </ol>`;
}
