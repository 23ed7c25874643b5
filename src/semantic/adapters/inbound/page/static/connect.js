// Connect: how to configure each client for this server.
import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { get, hasKey, known, sayFault, useTopics } from "./server.js";
import { Copy, number } from "./parts.js";

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
