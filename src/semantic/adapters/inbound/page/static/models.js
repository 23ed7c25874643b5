// Models: those on this machine, downloads, and known ones that suit this machine.
import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { get, known, listen, refreshModels, say, sayFault, send, usePolling, useTopics } from "./server.js";
import { Bar, Button, STARTER, STARTER_NOTE, bytes, number, percent, short } from "./parts.js";
import { askRemoveModel } from "./actions.js";

const BUSY = new Set(["loading", "swapping"]);
const speedOf = (rate) => (!rate ? "–" : rate < 1 ? "under 1" : `about ${number(rate)}`);
const matches = (text, ...names) => names.join(" ").toLowerCase().includes(text.trim().toLowerCase());

/** Run an operation, say what it does, and show its error if it fails. */
async function attempt(work, text, then) {
  try {
    const done = await work();
    say(typeof text === "function" ? text(done) : text);
    await then();
  } catch (error) {
    sayFault(error);
  }
}

/** What the server knows of its models, and the operations on them. */
function useModels() {
  const [models, setModels] = useState(null);
  const [fault, setFault] = useState("");
  const [suggested, setSuggested] = useState([]);
  const [downloads, setDownloads] = useState([]);
  const load = async () => {
    await refreshModels();
    try {
      setModels((await get("admin/models")).models);
      setDownloads((await get("admin/models/downloads")).downloads);
      setFault("");
    } catch (error) {
      setModels(known.models.map((model) => ({ ...model, state: model.state ?? known.health?.state, detail: model.detail ?? "" })));
      setFault(error.status === 403 ? error.message : "");
    }
  };
  const isBusy = models?.some((model) => BUSY.has(model.state));
  const isDownloading = downloads.some((one) => one.state === "running");
  usePolling(load, isBusy || isDownloading ? 700 : 4000, [isBusy, isDownloading]);
  useEffect(() => listen(["events"], () => load().catch(() => {})), []);
  // Without an admin key the list stays empty: downloading and serving another model need one too.
  useEffect(() => void get("admin/models/recommended").then(({ models }) => setSuggested(models), () => {}), [models?.length]);

  const post = (deed, body, text) => attempt(() => send("POST", `admin/models/${deed}`, body), text, load);
  const drop = (path, text) => attempt(() => send("DELETE", `admin/models/${path}`), text, load);
  const on = {
    serve: (id) => post("swap", { model: id, wait: false }, `${id} loads when running requests have finished.`),
    unload: (id) => post("unload", { wait: false }, `Unloading ${id}.`),
    download: (id) => post("downloads", { model: id }, `Downloading ${id}. You can go on working meanwhile.`),
    stop: (id) => drop(`downloads/${encodeURIComponent(id)}`, `Stopping the download of ${id}.`),
    dismiss: (id) => attempt(() => send("DELETE", `admin/models/downloads/${encodeURIComponent(id)}`), `Removed ${id} from the list.`, load),
    remove: (id) => askRemoveModel(id, () => drop(encodeURIComponent(id), ({ freed_bytes: freed }) => `Deleted ${id}: ${bytes(freed)} freed.`)),
  };
  return { models, fault, suggested, downloads, isBusy, on };
}

export function Models() {
  useTopics("models");
  const { models, fault, suggested, downloads, isBusy, on } = useModels();
  const [text, setText] = useState("");
  const here = models?.filter((model) => matches(text, model.id, model.family, model.precision));
  const offered = suggested.filter((one) => matches(text, one.name, one.source, one.licence));
  const problem = known.health?.problem;
  return html`<section class="models">
    <header class="tools"><h1>Models</h1>
      <input id="search" type="search" placeholder="Find a model  ( / )" aria-label="Find a model" value=${text} onInput=${(event) => setText(event.target.value)} />
    </header>
    ${fault && html`<p class="fault">${fault}</p>`}
    ${problem && html`<p class="fault">${problem}</p>`}
    ${downloads.length > 0 && html`<h2>Downloads</h2><ul class="downloads">${downloads.map((one) => html`<${Download} key=${one.model} download=${one} on=${on} isBusy=${isBusy} />`)}</ul>`}
    <h2>On this machine</h2>
    <div class="cards">${here?.map((model) => html`<${Model} key=${model.id} model=${model} on=${on} canChange=${!fault && !isBusy} />`)}</div>
    ${here && !here.length && html`<p class="note part">No model on this machine matches.</p>`}
    ${offered.length > 0 && html`<${Recommended} models=${offered} downloads=${downloads} on=${on} isBusy=${isBusy} />`}
    ${!fault && html`<${Another} on=${on} isBusy=${isBusy} />`}
  </section>`;
}

function Model({ model, on, canChange }) {
  const isServed = model.state === "ready";
  const compute = model.id === known.health?.model ? known.health.compute : null;
  const facts = [
    model.bits && html`<span title="Bits of each weight: fewer bits need less memory and are faster, and are a little less exact">${model.bits} bits</span>`,
    model.parameters > 0 && html`<span title="Number of weights">${short(model.parameters)} parameters</span>`,
    model.max_context > 0 && html`<span title="How long a conversation may be, in tokens: about four letters each">context ${number(model.max_context)}</span>`,
    model.size_bytes > 0 && html`<span title="Size on disk">${bytes(model.size_bytes)}</span>`,
    model.family && html`<span title="Architecture">${model.family}</span>`,
    model.draft_model && html`<span title=${`${model.draft_model === "mtp" ? "Its own MTP head" : "A smaller model"} drafts words, which this one confirms: faster replies with the same text`}>drafts by ${model.draft_model}</span>`,
  ].filter(Boolean);
  return html`<article class=${`card ${isServed ? "served" : ""}`}>
    <header><b>${model.id}</b><span class=${`state ${model.state}`}>${isServed ? "in use" : String(model.state).replace("_", " ")}</span></header>
    <p class="note dotted">${facts}</p>
    ${compute && html`<p class="note">Computed in ${[compute.dtype, compute.device, compute.kernels].filter(Boolean).join(", ")}</p>`}
    ${BUSY.has(model.state) && html`<div class="progress"><i /></div>`}
    ${model.detail && model.detail !== model.state && html`<p class="detail-text">${model.detail}</p>`}
    ${model.id === STARTER && html`<p class="note">${STARTER_NOTE}</p>`}
    ${model.fits === true && !isServed && html`<p class="fits">Fits in this machine's memory</p>`}
    ${model.fits === false && html`<p class="fault">Does not fit in this machine's memory.</p>`}
    <footer>
      ${isServed && canChange && html`<${Button} onClick=${() => on.unload(model.id)} title="Free its memory; the next request loads it again">Unload<//>`}
      ${!isServed && !BUSY.has(model.state) && canChange && html`<${Button} kind="main" onClick=${() => on.serve(model.id)}>Serve<//><${Button} onClick=${() => on.remove(model.id)}>Delete<//>`}
    </footer>
  </article>`;
}

function Download({ download, on, isBusy }) {
  const { model, state, detail, done_bytes: done, total_bytes: all } = download;
  const share = all ? `${bytes(done)} of ${bytes(all)}, ${percent(done / all)}` : detail || "starting";
  const told = { running: share, done: "complete", stopped: "stopped; files that arrived are kept", failed: detail };
  return html`<li class=${`download ${state}`}>
    <b>${model}</b><span class=${state === "failed" ? "fault" : "note"} role="status">${told[state]}</span>
    ${state === "running" && (all ? html`<${Bar} parts=${[["accent", done]]} whole=${all} isThick label=${share} />` : html`<div class="progress"><i /></div>`)}
    <span class="go">
      ${state === "running" && html`<${Button} onClick=${() => on.stop(model)}>Cancel<//>`}
      ${state === "done" && html`<${Button} kind="main" disabled=${isBusy} onClick=${() => on.serve(model)}>Serve<//>`}
      ${(state === "stopped" || state === "failed") && html`<${Button} onClick=${() => on.download(model)}>${state === "stopped" ? "Resume" : "Try again"}<//>`}
      ${state !== "running" && html`<${Button} kind="quiet" icon="close" title="Remove from this list" onClick=${() => on.dismiss(model)} />`}
    </span>
  </li>`;
}

/** Known models, and how they would run on this machine. */
function Recommended({ models, downloads, on, isBusy }) {
  const running = new Set(downloads.filter((one) => one.state === "running").map((one) => one.model));
  const action = (one) => {
    if (!one.fits) return html`<span class="note">does not fit</span>`;
    if (running.has(one.source)) return html`<span class="note">downloading</span>`;
    return one.is_here
      ? html`<${Button} disabled=${isBusy} onClick=${() => on.serve(one.source)}>Serve<//>`
      : html`<${Button} kind=${one.is_best ? "main" : ""} onClick=${() => on.download(one.source)}>Download<//>`;
  };
  return html`<h2>Recommended for this machine</h2>
    <table class="offers">
      <thead><tr><th>Model</th><th>Download</th><th>Memory</th><th>Context</th><th>Tokens/s</th><th>Tools</th><th>Licence</th><th></th></tr></thead>
      <tbody>${models.map((one) => html`<tr class=${one.fits ? "" : "unfit"} key=${one.name}>
        <td><b>${one.name}</b>${one.is_best && html` <span class="state ready">best here</span>`}</td>
        <td data-label="download">${one.is_here ? "on this machine" : bytes(one.size_bytes)}</td>
        <td data-label="memory">${bytes(one.memory_bytes)}</td>
        <td data-label="context">${short(one.max_context)}</td>
        <td data-label="tokens/s">${speedOf(one.tokens_per_s)}</td>
        <td data-label="tools">${one.has_tools ? "yes" : "no"}</td>
        <td data-label="licence">${one.licence}</td>
        <td>${action(one)}</td>
      </tr>`)}</tbody>
    </table>
    <p class="note part">Memory is for weights of 4 bits and a conversation of 16,384 tokens. Speeds are estimated from this machine's memory bandwidth. Tools: the model can call functions, which coding agents need.</p>`;
}

function Another({ on, isBusy }) {
  const [wanted, setWanted] = useState("");
  const name = wanted.trim();
  return html`<h2>Another model</h2>
    <form class="fetch" onSubmit=${(event) => (event.preventDefault(), name && on.download(name))}>
      <input aria-label="Another model" value=${wanted} onInput=${(event) => setWanted(event.target.value)} placeholder="a Hugging Face id such as Qwen/Qwen2.5-0.5B-Instruct, or a path" />
      <button class="main" disabled=${!name}>Download</button>
      <${Button} disabled=${!name || isBusy} onClick=${() => on.serve(name)}>Serve<//>
      <small>Serve downloads a model first if necessary. If loading fails, the server loads the previous model again.</small>
    </form>`;
}
