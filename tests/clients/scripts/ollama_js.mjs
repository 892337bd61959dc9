// The ollama package for JavaScript.
import { Ollama } from 'ollama'
import * as report from './report.mjs'
import { check, expect } from './report.mjs'

const client = new Ollama({ host: report.URL_ })
const keyed = (key) => new Ollama({ host: report.SCRIPTED_URL, headers: { Authorization: `Bearer ${key}` } })
const scripted = keyed(report.KEY)
const tools = [{ type: 'function', function: report.TOOL }]
const short = { num_predict: 20, temperature: 0 }

function chat(text, more = {}, server = client) {
  const model = server === client ? 'builtin' : 'scripted'
  return server.chat({ model, messages: [{ role: 'user', content: text }], ...more })
}

await check('chat', async () => expect((await chat('Say hello.', { options: short })).message.content, 'no text'))
await check('stream', async () => {
  const parts = []
  for await (const part of await chat('Hello.', { stream: true }, scripted)) parts.push(part.message.content)
  expect(parts.length > 2 && parts.join('') === 'Hello from the script.', parts)
})
await check('system prompt', async () => {
  const messages = [{ role: 'system', content: report.SYSTEM }, { role: 'user', content: report.QUOTE }]
  expect((await chat('', { messages }, scripted)).message.content.includes(report.SYSTEM), 'not quoted')
})
const turns = [{ role: 'user', content: 'How warm is Rome?' }]
await check('tool call', async () => {
  const { message } = await chat('', { messages: turns, tools }, scripted)
  expect(message.tool_calls[0].function.arguments.city === 'Rome', message)
  turns.push(message, { role: 'tool', tool_name: 'weather', content: report.RESULT })
})
await check('tool result', async () => {
  expect((await chat('', { messages: turns, tools }, scripted)).message.content.includes(report.RESULT), 'no result')
  expect((await chat('', { messages: turns, tools, options: { num_predict: 5 } })).done, 'not done')
})
await check('structured output', async () => {
  const reply = await chat('Name a colour.', { format: report.SCHEMA, options: { num_predict: 200 } })
  report.checkDocument(JSON.parse(reply.message.content))
})
await check('embeddings', async () => {
  const { embeddings } = await client.embed({ model: 'builtin', input: ['A cat.', 'A dog.'] })
  expect(embeddings.length === 2 && embeddings[0].length > 1, embeddings)
})
await check('any model name', async () => {
  expect((await chat('Say hello.', { model: 'llama3.2', options: short })).message.content, 'no text')
})
await check('unknown model', () => report.refusal(
  (error) => error.status_code === 404, () => chat('Hello.', { model: 'none' }, scripted)))
await check('context overflow', async () => {
  const error = await report.refusal((error) => error.status_code === 400, () => chat(report.TOO_LONG))
  expect(error.message.includes('context length'), error.message)
})
await check('wrong key', () => report.refusal((error) => error.status_code === 401, () => keyed('wrong').list()))
await check('usage', async () => {
  const reply = await chat('Say hello.', { options: short })
  expect(reply.prompt_eval_count && reply.eval_count && reply.total_duration, reply)
})
await check('cancel', async () => {
  const stream = await chat(report.COUNT, { stream: true }, scripted)
  let seen = 0
  await report.refusal((error) => error.name === 'AbortError', async () => {
    for await (const part of stream) if (part && ++seen === 5) stream.abort()
  })
  await report.awaitStop()
})
await check('max_tokens above the context', async () => {
  expect((await chat('Say hello.', { options: { num_predict: report.MAX_TOKENS } })).done, 'not done')
})
await check('reasoning', async () => {
  const { message } = await chat('Think.', { think: true }, scripted)
  expect(message.content === 'Four.' && message.thinking.includes('Two and two'), message)
})
