// Replies as Markdown: marked parses, highlight.js colours code, DOMPurify sanitises the result.
import { html, useMemo } from "./vendor/preact-htm.js";
import { copyText } from "./clipboard.js";
import { Marked } from "./vendor/marked.js";
import hljs from "./vendor/highlight.js";
import "./vendor/purify.js"; // defines DOMPurify

const POLICY = {
  ALLOWED_TAGS: "a blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr kbd li ol p pre span strong sub sup table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["align", "start", "type"], // the others must match the expression above
};
// HTML that models use in Markdown for want of a notation; any other tag is shown as text.
const PLAIN_TAG = /^<(?:br\s*\/?|\/?(?:kbd|sub|sup))>$/i;
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

const escape = (text) => text.replace(/[&<>"']/g, (mark) => ENTITIES[mark]);

function code({ text, lang }) {
  const language = (lang ?? "").match(/^[\w+#.-]+/)?.[0] ?? "";
  const isKnown = language && hljs.getLanguage(language);
  const coloured = isKnown ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escape(text);
  return `<div class="code"><div class="bar-of-code"><span>${escape(language)}</span><button type="button" class="quiet copy-code">Copy</button></div><pre><code>${coloured}</code></pre></div>`;
}

// TeX stays as it is written: Markdown would read its underscores and backslashes.
const MATHS = [
  {
    name: "formula",
    level: "block",
    start: (rest) => rest.match(/^ {0,3}(?:\$\$|\\\[)/m)?.index,
    tokenizer(rest) {
      const found = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/.exec(rest);
      return found ? { type: "formula", raw: found[0], text: (found[1] ?? found[2]).trim() } : undefined;
    },
    renderer: ({ text }) => `<pre class="maths">${escape(text)}</pre>`,
  },
  {
    name: "term",
    level: "inline",
    start: (rest) => rest.match(/\$|\\[([]/)?.index,
    tokenizer(rest) {
      const found = /^(?:\$\$([^$]+?)\$\$|\$(?!\s)((?:\\.|[^$\\\n])+?)(?<!\s)\$(?!\d)|\\\(([\s\S]+?)\\\)|\\\[([\s\S]+?)\\\])/.exec(rest);
      return found ? { type: "term", raw: found[0], text: found.slice(1).find(Boolean).trim() } : undefined;
    },
    renderer: ({ text }) => `<code class="maths">${escape(text)}</code>`,
  },
];

const marked = new Marked({
  gfm: true,
  breaks: true, // a line that the model ends is a line
  extensions: MATHS,
  renderer: {
    code,
    html: ({ text }) => (PLAIN_TAG.test(text.trim()) ? text : escape(text)),
    // The page loads nothing from other hosts: an image is a link to it.
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

globalThis.DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A" || !node.hasAttribute("href")) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

function Block({ token }) {
  const clean = useMemo(() => globalThis.DOMPurify.sanitize(marked.parser([token]), POLICY), [token.raw]);
  return html`<div class="block" dangerouslySetInnerHTML=${{ __html: clean }} />`;
}

async function copyCode(event) {
  const button = event.target.closest(".copy-code");
  if (!button) return;
  await copyText(button.closest(".code").querySelector("pre").textContent);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1200);
}

/** Text in Markdown. While it grows, only the blocks that change are drawn again. */
export function Prose({ text }) {
  const tokens = useMemo(() => marked.lexer(text).filter((token) => token.type !== "space"), [text]);
  return html`<div class="prose" onClick=${copyCode}>${tokens.map((token, index) => html`<${Block} key=${index} token=${token} />`)}</div>`;
}
