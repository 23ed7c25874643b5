// Memory: a live map with a cell for every block, and the use of memory, disk and device.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { known, listen, refreshCache, say, sayFault, send, usePolling, useTopics } from "./server.js";
import { Bar, Button, ago, bytes, number, percent, short } from "./parts.js";
import { chainOf, countSoon, map, ownersOf, rearrange, refreshBlocks } from "./blocks.js";

const FLASH_MS = 1600;
const LEVELS = 4; // colour strength by number of agents: none, one, a few, many
const KINDS = { dirty: "in memory, not on disk yet", both: "in memory and on disk", disk: "on disk" };

const kindOf = (block) => (!block.memory ? "disk" : block.disk ? "both" : "dirty");
const levelOf = (share) => (share < 2 ? share : share < 4 ? 2 : 3);

// -- the canvas --------------------------------------------------------------------------------

/** Draws the map: all cells after a change, otherwise only the flashing ones. */
class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.chain = null;
    this.chosen = -1;
    this.painted = -1;
    this.frames = 0;
    this.flashing = new Set();
  }

  /** Choose the largest cell size at which all blocks fit, down to 5 pixels. */
  measure() {
    const box = this.canvas.parentElement;
    const width = box.clientWidth;
    const height = box.clientHeight;
    const count = Math.max(64, map.slots.length);
    let size = 30;
    while (size > 5 && Math.floor(width / size) * Math.floor(height / size) < count) size--;
    this.size = size;
    this.columns = Math.max(1, Math.floor(width / size));
    const tall = Math.max(height, Math.ceil(count / this.columns) * size);
    const ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(tall * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(tall * ratio);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${tall}px`;
      this.painted = -1;
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.ground = read("--ground");
    this.hole = read("--hole");
    this.ink = read("--ink");
    this.colours = {};
    for (const kind of Object.keys(KINDS)) {
      this.colours[kind] = Array.from({ length: LEVELS }, (_, level) => read(`--map-${kind}-${level}`));
    }
    this.flash = Object.fromEntries(["created", "read", "written", "shared", "evicted", "gone"].map((what) => [what, read(`--flash-${what}`)]));
    this.painted = -1;
  }

  paint(now) {
    const isNew = this.painted !== map.version;
    if (isNew) {
      this.measure();
      this.paintAll();
      this.painted = map.version;
    }
    for (const slot of this.flashing) if (!map.flashes.has(slot) && !isNew) this.paintCell(slot);
    this.flashing.clear();
    for (const [slot, { what, at }] of map.flashes) {
      const age = (now - at) / FLASH_MS;
      if (age >= 1) {
        map.flashes.delete(slot);
        this.paintCell(slot);
        continue;
      }
      this.paintCell(slot);
      this.flashing.add(slot);
      this.context.globalAlpha = 1 - age * age;
      this.fill(slot, this.flash[what]);
      this.context.globalAlpha = 1;
    }
    if (this.chosen >= 0) this.outline(this.chosen);
    this.frames++;
  }

  paintAll() {
    const { context } = this;
    context.fillStyle = this.ground;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    const groups = new Map(); // by colour: changing the colour costs more than drawing a cell
    for (let slot = 0; slot < map.slots.length; slot++) {
      const colour = this.colourOf(slot);
      if (groups.has(colour)) groups.get(colour).push(slot);
      else groups.set(colour, [slot]);
    }
    for (const [colour, slots] of groups) {
      context.fillStyle = colour;
      for (const slot of slots) this.rectangle(slot);
    }
  }

  colourOf(slot) {
    const block = map.slots[slot];
    if (!block) return this.hole;
    if (this.chain && !this.chain.has(block)) return this.hole;
    return this.colours[kindOf(block)][levelOf(block.share)];
  }

  rectangle(slot) {
    const { size, columns, context } = this;
    const x = (slot % columns) * size;
    const y = Math.floor(slot / columns) * size;
    const gap = size > 8 ? 2 : 1;
    context.fillRect(x, y, size - gap, size - gap);
  }

  fill(slot, colour) {
    this.context.fillStyle = colour;
    this.rectangle(slot);
  }

  paintCell(slot) {
    this.fill(slot, this.colourOf(slot));
  }

  outline(slot) {
    const { size, columns, context } = this;
    context.strokeStyle = this.ink;
    context.lineWidth = 1.5;
    context.strokeRect((slot % columns) * size - 0.5, Math.floor(slot / columns) * size - 0.5, size, size);
  }

  choose(slot) {
    if (slot === this.chosen) return;
    this.chosen = slot;
    this.painted = -1;
  }

  slotAt(x, y) {
    const column = Math.floor(x / this.size);
    const slot = Math.floor(y / this.size) * this.columns + column;
    return column < this.columns && slot < map.slots.length ? slot : -1;
  }
}

function BlockMap({ agent, onSeen }) {
  const canvas = useRef();
  const painter = useRef();
  const [tip, setTip] = useState(null);

  useEffect(() => {
    const drawn = (painter.current = new Painter(canvas.current));
    drawn.readColours();
    let request = 0;
    const frame = (now) => {
      if (drawn.painted !== map.version || map.flashes.size || drawn.flashing.size) drawn.paint(now);
      request = requestAnimationFrame(frame);
    };
    request = requestAnimationFrame(frame);
    const again = () => (drawn.readColours(), drawn.measure());
    const observer = new ResizeObserver(again);
    observer.observe(canvas.current.parentElement);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", again);
    const unlisten = listen(["theme"], again);
    return () => {
      cancelAnimationFrame(request);
      observer.disconnect();
      scheme.removeEventListener("change", again);
      unlisten();
    };
  }, []);

  useEffect(() => {
    painter.current.chain = agent ? chainOf(agent) : null;
    painter.current.painted = -1;
  }, [agent, map.version]);

  const show = (slot, x, y) => {
    painter.current.choose(slot);
    const block = map.slots[slot];
    setTip(block ? { block, x, y } : null);
  };
  const point = (event) => {
    const box = canvas.current.getBoundingClientRect();
    show(painter.current.slotAt(event.clientX - box.left, event.clientY - box.top), event.clientX, event.clientY);
  };
  const press = (event) => {
    const { columns, chosen, size } = painter.current;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!step) return;
    event.preventDefault();
    const slot = Math.min(map.slots.length - 1, Math.max(0, chosen + step));
    const box = canvas.current.getBoundingClientRect();
    show(slot, box.left + (slot % columns) * size + size, box.top + Math.floor(slot / columns) * size);
  };
  const leave = () => show(-1);
  return html`<div class="map">
    <canvas ref=${canvas} tabindex="0" role="img" aria-label=${`${map.byName.size} blocks in the map`} onPointerMove=${point} onPointerDown=${point} onPointerLeave=${leave} onKeyDown=${press} onBlur=${leave} />
    ${tip && html`<${Tip} ...${tip} onSeen=${onSeen} />`}
  </div>`;
}

function Tip({ block, x, y }) {
  const owners = ownersOf(block);
  const left = Math.min(x + 14, innerWidth - 290);
  const top = y > innerHeight - 190 ? y - 180 : y + 16;
  return html`<div class="tip" style=${{ left: `${Math.max(8, left)}px`, top: `${top}px` }} role="status">
    <b><i class=${`dot map-${kindOf(block)}`} />${KINDS[kindOf(block)]}</b>
    <span>${number(block.tokens)} tokens, ${number(block.start)} to ${number(block.start + block.tokens - 1)}</span>
    <span>${block.memory ? `${bytes(block.memory)} in memory` : ""}${block.memory && block.disk ? ", " : ""}${block.disk ? `${bytes(block.disk)} on disk` : ""}</span>
    <span>used ${ago(block.used)}${Date.now() / 1000 - block.used > 5 ? " ago" : ""}${block.pinned ? ", pinned" : ""}</span>
    <span class="owners">${owners.length ? owners.slice(0, 6).join(", ") : "no agent uses it"}${owners.length > 6 ? ` and ${owners.length - 6} more` : ""}</span>
    <code>${block.name}</code>
  </div>`;
}

// -- the view ----------------------------------------------------------------------------------

export function Memory() {
  useTopics("cache", "agents");
  const [, setSeen] = useState(0);
  const [agent, setAgent] = useState("");
  usePolling(async () => (await refreshBlocks()) && setSeen((count) => count + 1), 1000);
  useEffect(() => listen(["agents"], countSoon), []);
  useEffect(() => listen(["linked"], () => refreshBlocks().catch(() => {})), []);
  const cache = known.cache;
  const counts = { dirty: 0, both: 0, disk: 0 };
  let shared = 0;
  for (const block of map.byName.values()) {
    counts[kindOf(block)]++;
    shared += block.share > 1;
  }
  const collect = async () => {
    try {
      const { freed_bytes } = await send("POST", "v1/cache/gc", { orphan_age_s: 0 });
      say(`Freed ${bytes(freed_bytes)} of blocks that no agent uses.`);
      refreshCache();
    } catch (error) {
      sayFault(error);
    }
  };
  return html`<section class="memory">
    <header class="tools">
      <h1>Memory</h1>
      <input list="agent-names" type="search" placeholder="Show one agent's blocks" aria-label="Show one agent's blocks" value=${agent} onInput=${(event) => setAgent(known.agents.has(event.target.value) ? event.target.value : "")} />
      <datalist id="agent-names">${[...known.agents.keys()].slice(0, 500).map((id) => html`<option value=${id} />`)}</datalist>
      <${Button} onClick=${rearrange} title="Put the blocks of one conversation side by side again">Arrange<//>
      <${Button} onClick=${collect} title="Delete blocks that no agent uses any more">Clean up<//>
    </header>
    <p class="note part">Each square is a block: what the model computed for up to 256 tokens. A block in memory or on disk is not computed again, and agents that begin alike share it.</p>
    ${known.cacheFault && html`<p class="fault">${known.cacheFault}</p>`}
    ${cache && html`<${Budgets} cache=${cache} />`}
    <div class="legend">
      ${Object.entries(KINDS).map(([kind, text]) => html`<span><i class=${`dot map-${kind}`} />${text} <b>${short(counts[kind])}</b></span>`)}
      <span><i class="dot shared" />stronger colour: shared <b>${short(shared)}</b></span>
      <span class="flashes">${["created", "written", "read", "shared", "evicted"].map((what) => html`<i class=${`dot flash-${what}`} />${what} `)}</span>
    </div>
    <${BlockMap} agent=${agent} />
    ${!map.byName.size && html`<p class="note over">${map.isLoading ? "Reading blocks…" : "No blocks yet. They appear after the first requests."}</p>`}
  </section>`;
}

function Budgets({ cache }) {
  const { memory, disk, device } = cache;
  const kept = memory.used - memory.working;
  return html`<div class="budgets">
    <${Budget} name="RAM" used=${memory.used} budget=${memory.budget} parts=${[["pool", kept], ["hot", memory.working]]} note=${`${bytes(kept)} of blocks, ${bytes(memory.working)} in use by requests`} />
    <${Budget} name="Disk" used=${disk.used + disk.other} budget=${disk.budget} parts=${[["disk", disk.used], ["computed", disk.other]]} note=${disk.problem || `${short(disk.files)} files, ${bytes(disk.other)} for messages and turns`} />
    ${device ? html`<${Budget} name="Device" used=${device.used} budget=${device.budget} parts=${[["pool", device.weights], ["hot", device.sequences], ["disk", device.cached], ["computed", device.scratch]]} note=${`${bytes(device.weights)} of weights, ${bytes(device.sequences)} of open conversations, ${bytes(device.cached)} cached by the library, ${bytes(device.scratch)} of other use`} />` : html`<div class="budget"><header><b>Device</b><span>none reported</span></header><small>on a CPU, the KV cache is in RAM</small></div>`}
    <${Budget} name="Write queue" used=${disk.queue_used} budget=${disk.queue_budget} parts=${[["disk", disk.queue_used]]} note=${disk.queue_used ? "being written" : "empty"} />
    <div class="budget"><header><b>Sharing</b><span>${cache.dedup_ratio ? `${cache.dedup_ratio.toFixed(2)} ×` : "–"}</span></header><small>${cache.dedup_ratio ? "size without sharing, compared with the actual size" : "no KV cache yet"}</small></div>
    <div class="budget"><header><b>Reused</b><span>${percent(cache.hit_rates.all)}</span></header><${Bar} parts=${["hot", "pool", "disk", "computed"].map((name) => [name, cache.reuse[name]])} label="prompt tokens by source" /><small>of ${short(Object.values(cache.reuse).reduce((a, b) => a + b, 0))} prompt tokens</small></div>
  </div>`;
}

function Budget({ name, used, budget, parts, note }) {
  return html`<div class="budget">
    <header><b>${name}</b><span>${bytes(used)} of ${bytes(budget)}</span></header>
    <${Bar} parts=${parts} whole=${budget || 1} isThick label=${`${name}: ${bytes(used)} of ${bytes(budget)}`} />
    <small>${note}</small>
  </div>`;
}
