// Models: the served model, the models on this machine, and swapping.
// Connect: how to configure each client for this server.
import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { get, hasKey, known, listen, refreshModels, say, sayFault, send, usePolling, useTopics } from "./server.js";
import { Button, Copy, bytes, number } from "./parts.js";

// -- models ------------------------------------------------------------------------------------

const BUSY = new Set(["loading", "swapping"]);

export function Models() {
  useTopics("models");
  const [models, setModels] = useState(null);
  const [fault, setFault] = useState("");
  const [wanted, setWanted] = useState("");
  const load = async () => {
    await refreshModels();
    try {
      setModels((await get("admin/models")).models);
      setFault("");
    } catch (error) {
      setModels(known.models.map((model) => ({ ...model, state: model.state ?? known.health?.state, detail: model.detail ?? "" })));
      setFault(error.status === 403 ? error.message : "");
    }
  };
  const isBusy = models?.some((model) => BUSY.has(model.state));
  usePolling(load, isBusy ? 700 : 4000, [isBusy]);
  useEffect(() => listen(["events"], () => load().catch(() => {})), []);

  const change = async (deed, body, text) => {
    try {
      await send("POST", `admin/models/${deed}`, { ...body, wait: false });
      say(text);
      await load();
    } catch (error) {
      sayFault(error);
    }
  };
  const serve = (id) => change("swap", { model: id }, `${id} loads when running requests have finished.`);
  const health = known.health;
  return html`<section class="models">
    <header class="tools"><h1>Models</h1></header>
    ${fault && html`<p class="fault">${fault}</p>`}
    ${health?.problem && html`<p class="fault">${health.problem}</p>`}
    <div class="cards">
      ${models?.map((model) => html`<${Model} key=${model.id} model=${model} onServe=${() => serve(model.id)} onUnload=${() => change("unload", {}, `Unloading ${model.id}.`)} canSwap=${!fault && !isBusy} />`)}
    </div>
    ${!fault && html`<form class="fetch" onSubmit=${(event) => (event.preventDefault(), wanted.trim() && serve(wanted.trim()))}>
      <label class="field"><span>Serve another model</span>
        <input value=${wanted} onInput=${(event) => setWanted(event.target.value)} placeholder="a path, or a Hugging Face id such as Qwen/Qwen2.5-0.5B-Instruct" /></label>
      <button class="main" disabled=${!wanted.trim() || isBusy}>Serve</button>
      <small>The server first downloads a model that is not on this machine. If loading fails, the server loads the previous model again.</small>
    </form>`}
  </section>`;
}

function Model({ model, onServe, onUnload, canSwap }) {
  const compute = model.id === known.health?.model ? known.health.compute : null;
  const isServed = model.state === "ready";
  const facts = [
    model.max_context && `context ${number(model.max_context)}`,
    model.family,
    model.size_bytes && bytes(model.size_bytes),
    compute && Object.values(compute).filter((value) => typeof value === "string").join(", "),
    isServed && known.health?.backend,
  ].filter(Boolean);
  return html`<article class=${`card ${isServed ? "served" : ""}`}>
    <header><b>${model.id}</b><span class=${`state ${model.state}`}>${String(model.state).replace("_", " ")}</span></header>
    <p class="note">${facts.join(" · ")}</p>
    ${BUSY.has(model.state) && html`<div class="progress"><i /></div>`}
    ${model.detail && model.detail !== model.state && html`<p class="detail-text">${model.detail}</p>`}
    ${model.fits === false && html`<p class="fault">Its weights do not fit in this machine's memory.</p>`}
    <footer>
      ${isServed && canSwap && html`<${Button} onClick=${onUnload}>Unload<//>`}
      ${!isServed && !BUSY.has(model.state) && canSwap && html`<${Button} kind="main" onClick=${onServe}>Serve<//>`}
    </footer>
  </article>`;
}

// -- connect -----------------------------------------------------------------------------------

export function Connect() {
  useTopics("models");
  const [clients, setClients] = useState([]);
  const [name, setName] = useState("");
  const [text, setText] = useState("");
  useEffect(() => void get("page/connect.json").then(setClients, sayFault), []);
  const model = known.models.find((one) => one.id === name) ?? known.models[0];
  const context = model?.max_context || known.models[0]?.max_context || 8192;
  const values = {
    url: location.origin + location.pathname.replace(/\/$/, ""),
    model: model?.id ?? "…",
    context,
    output: Math.floor(context / 4),
    key: hasKey() ? "YOUR-KEY" : "none",
  };
  const fill = (snippet) => snippet.replace(/\{(url|model|context|output|key)\}/g, (_, field) => values[field]);
  const shown = clients.filter((client) => client.name.toLowerCase().includes(text.toLowerCase()));
  return html`<section class="connect">
    <header class="tools"><h1>Connect</h1>
      <input id="search" type="search" placeholder="Find a client  ( / )" aria-label="Find a client" value=${text} onInput=${(event) => setText(event.target.value)} />
    </header>
    <dl class="address">
      <dt>OpenAI base URL</dt><dd><code>${values.url}/v1</code><${Copy} text=${`${values.url}/v1`} /></dd>
      <dt>Anthropic base URL</dt><dd><code>${values.url}</code><${Copy} text=${values.url} /></dd>
      <dt>Model</dt><dd><select onChange=${(event) => setName(event.target.value)}>${known.models.map((one) => html`<option selected=${one.id === values.model}>${one.id}</option>`)}</select></dd>
      <dt>Context</dt><dd>${number(context)} tokens, prompt and reply together</dd>
      <dt>Key</dt><dd>${hasKey() ? "the key you entered here" : "any text: this server requires no key"}</dd>
    </dl>
    ${shown.map((client) => html`<article class="client" key=${client.name}>
      <h2>${client.name}</h2>
      ${client.launch && html`<${Snippet} note="For one run, without changing the client's configuration:" text=${`semantic launch ${client.launch} --server ${values.url}`} />`}
      ${client.steps.map((step) => html`<${Snippet} note=${step.note} text=${fill(step.text)} />`)}
    </article>`)}
  </section>`;
}

const Snippet = ({ note, text }) =>
  html`<div class="step">${note && html`<p class="note">${note}</p>`}
    <div class="code"><${Copy} text=${text} /><pre>${text}</pre></div>
  </div>`;
