// Pictures of messages: chosen, dropped or pasted in the composer, and shown in turns.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { ask, known, sayFault } from "./server.js";
import { Button } from "./parts.js";

const STORED = "sha256:";
export const attached = new Map(); // pictures of unsent messages by agent: data URIs, or digests of stored ones

/** The pictures of a message, as they are sent again. */
export const picturesOf = (message) => message.content.filter(({ type }) => type === "image").map((part) => part.source ?? STORED + part.sha256);

/** The text of a message without a mention of its pictures. */
export const wordsOf = (message) => message.content.map((part) => (part.type === "text" ? part.text : "")).join("");

const read = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });

/** A picture: one that was just chosen, or one of a stored turn. */
export function Picture({ source, size = "", onRemove }) {
  const [url, setUrl] = useState(source.startsWith(STORED) ? null : source);
  useEffect(() => {
    if (!source.startsWith(STORED)) return void setUrl(source);
    let made = null;
    let isOver = false;
    // With the key, which an address in the page could not carry.
    const load = async () => {
      const file = await (await ask(`v1/images/${source.slice(STORED.length)}`)).blob();
      if (!isOver) setUrl((made = URL.createObjectURL(file)));
    };
    load().catch(sayFault);
    return () => ((isOver = true), made && URL.revokeObjectURL(made));
  }, [source]);
  return html`<span class="picture">
    ${url ? html`<img src=${url} alt=${`Picture ${size}`} />` : html`<span class="note">picture ${size}</span>`}
    ${onRemove && html`<${Button} icon="close" kind="quiet" isLocal title="Remove the picture" onClick=${onRemove} />`}
  </span>`;
}

/** The pictures that wait for the next message to `id`, and how files get there. */
export function useAttached(id) {
  const [pictures, setPictures] = useState(attached.get(id) ?? []);
  const keep = (list) => (attached.set(id, list), setPictures(list));
  const take = async (event, files) => {
    const images = [...(files ?? [])].filter(({ type }) => type.startsWith("image/"));
    if (!images.length) return;
    event.preventDefault();
    const made = await Promise.all(images.map(read)).catch((error) => (sayFault(error), []));
    keep([...(attached.get(id) ?? []), ...made]);
  };
  return {
    pictures,
    keep,
    choose: (event) => take(event, event.target.files).then(() => (event.target.value = "")),
    paste: (event) => take(event, event.clipboardData?.files),
    drop: (event) => take(event, event.dataTransfer?.files),
    over: (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault(),
  };
}

export const Attached = ({ pictures, keep }) =>
  pictures.length > 0 &&
  html`<div class="pictures">${pictures.map((source, index) => html`<${Picture} key=${source} source=${source} onRemove=${() => keep(pictures.filter((_, other) => other !== index))} />`)}</div>`;

export function AddPicture({ onChoose }) {
  const input = useRef();
  const isRefused = known.health?.images === "none";
  const title = isRefused ? `${known.health.model} accepts only text` : "Add a picture; you can also drop or paste one";
  return html`<${Button} icon="image" kind="quiet" isLocal title=${title} disabled=${isRefused} onClick=${() => input.current.click()} />
    <input ref=${input} type="file" accept="image/png,image/jpeg,image/gif,image/webp,image/bmp" multiple hidden onChange=${onChoose} />`;
}
