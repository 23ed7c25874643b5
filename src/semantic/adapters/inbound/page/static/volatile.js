// What changes in an agent's prompts from turn to turn, what it costs, and the remedy.
import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { get } from "./server.js";
import { number } from "./parts.js";

/** The volatile spans of an agent; nothing if its prompts only grow. */
export function Volatile({ agent }) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    let isOver = false;
    get(`v1/agents/${agent.id}/volatile`).then((report) => isOver || setFound(report), () => {});
    return () => void (isOver = true);
  }, [agent.id, agent.head]);
  if (!found?.spans.length) return null;
  return html`<div class="log volatile">
    <h3>What changes in its prompts</h3>
    <p class="note">${found.summary}</p>
    ${found.spans.map((span) => html`<${Span} key=${span.kind + span.line} span=${span} of=${found.comparisons} />`)}
  </div>`;
}

function Span({ span, of }) {
  const { remedy } = span;
  return html`<details class="system">
    <summary>${span.kind.replaceAll("_", " ")} in ${span.place}, changed ${span.changes} of ${of} times: <b>${number(span.recomputed_tokens)}</b> tokens computed again</summary>
    <p><del>${span.before}</del> <ins>${span.after}</ins></p>
    <pre>${span.line}</pre>
    <p class="note">${remedy.rule ? `Rule ${remedy.rule} repairs it. In the file of the setting repairs:` : "Remedy:"}</p>
    <pre>${remedy.text}</pre>
  </details>`;
}
