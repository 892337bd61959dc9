// The field for a new message, and the files that go with it.

import { bytes, html, useEffect, useRef, useState } from "./lib.js";
import { Documents } from "./messages.js";

const MAX_FILE_BYTES = 2 ** 20;

const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_SIDE = 1536;

/** Return a picture as {name, text, image}: a JPEG of at most `MAX_SIDE` on a side, on white, as a data URL. */
async function pictureOf(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is no picture that this browser can read`);
  });
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return { name: file.name || "picture", text: "", image: canvas.toDataURL("image/jpeg", 0.92) };
}

/** Return a file as a document {name, text}, or as a picture. Throws for one that is too large, or no text. */
async function documentOf(file) {
  if (PICTURES.includes(file.type)) return pictureOf(file);
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} has ${bytes(file.size)}; a file may have ${bytes(MAX_FILE_BYTES)}`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
  }
  throw new Error(`${file.name} is no text in UTF-8`);
}

/** `onSend(text, attachments)`, `onStop()`, `onEditLast()`: the arrow up in an empty field. */
export function Composer({ isReady, isBusy, onSend, onStop, onEditLast }) {
  const field = useRef(null), chooser = useRef(null);
  const [attachments, setAttachments] = useState([]);
  const [error, setError] = useState("");
  const add = async (files) => {
    setError("");
    const read = await Promise.allSettled([...files].map(documentOf));
    setAttachments((before) => [...before, ...read.filter(({ value }) => value).map(({ value }) => value)]);
    setError(read.filter(({ reason }) => reason).map(({ reason }) => reason.message).join("; "));
  };
  useEffect(() => {
    const over = (event) => [...event.dataTransfer.types].includes("Files") && event.preventDefault();
    const drop = (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      add(event.dataTransfer.files);
    };
    addEventListener("dragover", over);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("drop", drop);
    };
  }, []);
  const submit = (event) => {
    event?.preventDefault();
    const text = field.current.value.trim();
    if ((!text && !attachments.length) || isBusy || !isReady) return;
    field.current.value = "";
    setAttachments([]);
    onSend(text, attachments);
  };
  const press = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "ArrowUp" && !field.current.value && !isBusy && onEditLast()) event.preventDefault();
  };
  const paste = (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  };
  return html`<form class="composer" onSubmit=${submit}>
    ${attachments.length > 0 && html`<${Documents} of=${attachments} onRemove=${(i) => setAttachments(attachments.filter((_, each) => each !== i))} />`}
    ${error && html`<p role="alert" class="wide">${error}</p>`}
    <input ref=${chooser} type="file" multiple hidden aria-label="Files" onChange=${(event) => {
      add(event.target.files).then(() => (chooser.current.value = ""));
    }} />
    <button type="button" title="Attach pictures or text files, or drop them on the page" onClick=${() => chooser.current.click()}>Attach</button>
    <label><span class="hidden">Message</span>
      <textarea ref=${field} rows="2" placeholder="Message; Enter sends" onKeyDown=${press} onPaste=${paste} autofocus /></label>
    <button disabled=${isBusy || !isReady}>Send</button>
    ${isBusy && html`<button type="button" onClick=${onStop} aria-keyshortcuts="Escape">Stop</button>`}
  </form>`;
}
