// Models: the served model, the models on this machine, and swapping.
// Connect: how to configure each client for this server.
import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { get, hasKey, known, listen, refreshModels, say, sayFault, send, usePolling, useTopics } from "./server.js";
import { Button, Copy, STARTER, STARTER_NOTE, bytes, number, short } from "./parts.js";
import { askRemoveModel } from "./actions.js";

// -- models ------------------------------------------------------------------------------------

const BUSY = new Set(["loading", "swapping"]);

export function Models() {
  useTopics("models");
  const [models, setModels] = useState(null);
  const [fault, setFault] = useState("");
  const [wanted, setWanted] = useState("");
  const [suggested, setSuggested] = useState([]);
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
  // Without an admin key the list stays empty: serving another model needs one too.
  useEffect(() => void get("admin/models/recommended").then(({ models }) => setSuggested(models), () => {}), [models?.length]);

  const remove = async (id) => {
    try {
      const { freed_bytes } = await send("DELETE", `admin/models/${encodeURIComponent(id)}`);
      say(`Deleted ${id}: ${bytes(freed_bytes)} freed.`);
      await load();
    } catch (error) {
      sayFault(error);
    }
  };
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
      ${models?.map((model) => html`<${Model} key=${model.id} model=${model} onServe=${() => serve(model.id)} onUnload=${() => change("unload", {}, `Unloading ${model.id}.`)} onRemove=${() => askRemoveModel(model.id, () => remove(model.id))} canSwap=${!fault && !isBusy} />`)}
    </div>
    ${suggested.length > 0 && html`<${Recommended} models=${suggested} onServe=${serve} isBusy=${isBusy} />`}
    ${!fault && html`<form class="fetch" onSubmit=${(event) => (event.preventDefault(), wanted.trim() && serve(wanted.trim()))}>
      <label class="field"><span>Serve another model</span>
        <input value=${wanted} onInput=${(event) => setWanted(event.target.value)} placeholder="a path, or a Hugging Face id such as Qwen/Qwen2.5-0.5B-Instruct" /></label>
      <button class="main" disabled=${!wanted.trim() || isBusy}>Serve</button>
      <small>The server first downloads a model that is not on this machine. If loading fails, the server loads the previous model again.</small>
    </form>`}
  </section>`;
}

/** Known models, how they would run on this machine, and a button that downloads and serves one. */
function Recommended({ models, onServe, isBusy }) {
  return html`<details class="recommended" open=${known.health?.model === STARTER}>
    <summary>Recommended for this machine</summary>
    <div class="scroll"><table>
      <thead><tr><th>Model</th><th>Download</th><th>Memory</th><th>Context</th><th>Tokens/s</th><th>Tools</th><th>Licence</th><th></th></tr></thead>
      <tbody>${models.map((one) => html`<tr class=${one.fits ? "" : "faint"} key=${one.name}>
        <td><b>${one.name}</b>${one.is_best && html` <span class="state ready">best here</span>`}</td>
        <td>${one.is_here ? "on this machine" : bytes(one.size_bytes)}</td>
        <td>${bytes(one.memory_bytes)}</td>
        <td>${short(one.max_context)}</td>
        <td>${one.tokens_per_s ? `about ${number(one.tokens_per_s)}` : "–"}</td>
        <td>${one.has_tools ? "yes" : "no"}</td>
        <td>${one.licence}</td>
        <td>${one.fits ? html`<button disabled=${isBusy} onClick=${() => onServe(one.source)}>${one.is_here ? "Serve" : "Download and serve"}</button>` : "too large"}</td>
      </tr>`)}</tbody>
    </table></div>
    <small>Memory holds the weights in four bits and a conversation of 16,384 tokens. Speeds are estimated from this machine's memory bandwidth.</small>
  </details>`;
}

function Model({ model, onServe, onUnload, onRemove, canSwap }) {
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
    ${model.id === STARTER && html`<p class="note">${STARTER_NOTE}</p>`}
    ${model.fits === false && html`<p class="fault">Its weights do not fit in this machine's memory.</p>`}
    <footer>
      ${isServed && canSwap && html`<${Button} onClick=${onUnload}>Unload<//>`}
      ${!isServed && !BUSY.has(model.state) && canSwap && html`<${Button} kind="main" onClick=${onServe}>Serve<//><${Button} onClick=${onRemove}>Delete<//>`}
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
