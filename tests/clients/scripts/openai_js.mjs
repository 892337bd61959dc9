// The openai package for JavaScript.
import OpenAI from 'openai'
import * as report from './report.mjs'
import { check, expect } from './report.mjs'

const client = new OpenAI({ baseURL: report.URL_ + '/v1', apiKey: 'none', maxRetries: 0 })
const at = { baseURL: report.SCRIPTED_URL + '/v1', maxRetries: 0 }
const scripted = new OpenAI({ ...at, apiKey: report.KEY })
const tools = [{ type: 'function', function: report.TOOL }]

function chat(text, more = {}, server = client) {
  const model = server === client ? 'builtin' : 'scripted'
  return server.chat.completions.create({ model, messages: [{ role: 'user', content: text }], ...more })
}

async function pieces(stream) {
  const parts = []
  for await (const part of stream) parts.push(part.choices[0]?.delta?.content ?? '')
  return parts
}

await check('chat', async () => {
  expect((await chat('Say hello.', { max_tokens: 20 })).choices[0].message.content, 'no text')
})
await check('stream', async () => {
  const parts = await pieces(await chat('Say hello.', { max_tokens: 20, temperature: 0, stream: true }))
  const whole = (await chat('Say hello.', { max_tokens: 20, temperature: 0 })).choices[0].message.content
  expect(parts.length > 2 && parts.join('') === whole, [parts, whole])
})
await check('system prompt', async () => {
  const messages = [{ role: 'system', content: report.SYSTEM }, { role: 'user', content: report.QUOTE }]
  expect((await chat('', { messages }, scripted)).choices[0].message.content.includes(report.SYSTEM), 'not quoted')
})
const turns = [{ role: 'user', content: 'How warm is Rome?' }]
await check('tool call', async () => {
  const { message } = (await chat('', { messages: turns, tools }, scripted)).choices[0]
  expect(JSON.parse(message.tool_calls[0].function.arguments).city === 'Rome', message)
  turns.push(message)
})
await check('tool result', async () => {
  turns.push({ role: 'tool', tool_call_id: turns[1].tool_calls[0].id, content: report.RESULT })
  expect((await chat('', { messages: turns, tools }, scripted)).choices[0].message.content.includes(report.RESULT), 0)
  expect((await chat('', { messages: turns, tools, max_tokens: 5 })).choices[0].finish_reason, 'none')
})
await check('structured output', async () => {
  const response_format = { type: 'json_schema', json_schema: { name: 'answer', schema: report.SCHEMA, strict: true } }
  const reply = await chat('Name a colour.', { response_format, max_tokens: 200 })
  report.checkDocument(JSON.parse(reply.choices[0].message.content))
})
await check('embeddings', async () => {
  const { data } = await client.embeddings.create({ model: 'builtin', input: ['A cat.', 'A dog.'] })
  expect(data.length === 2 && data[0].embedding.length > 1, data)
  expect(data[0].embedding.some((number) => number !== 0), data)
})
await check('any model name', async () => {
  expect((await chat('Say hello.', { model: 'gpt-3.5-turbo', max_tokens: 5 })).model === 'builtin', 'another name')
})
await check('unknown model', async () => {
  const error = await report.refusal(
    (error) => error instanceof OpenAI.NotFoundError, () => chat('Hello.', { model: 'none' }, scripted))
  expect(error.code === 'model_not_found', error)
})
await check('context overflow', async () => {
  const error = await report.refusal((error) => error instanceof OpenAI.BadRequestError, () => chat(report.TOO_LONG))
  expect(error.code === 'context_length_exceeded', error)
})
await check('wrong key', async () => {
  const wrong = new OpenAI({ ...at, apiKey: 'wrong' })
  await report.refusal((error) => error instanceof OpenAI.AuthenticationError, () => wrong.models.list())
})
await check('usage', async () => {
  const { usage } = await chat('Say hello.', { max_tokens: 5 })
  expect(usage.prompt_tokens && usage.total_tokens === usage.prompt_tokens + usage.completion_tokens, usage)
})
await check('cancel', async () => {
  const stream = await chat(report.COUNT, { stream: true }, scripted)
  let seen = 0
  for await (const part of stream) if (part && ++seen === 5) break
  await report.awaitStop()
})
await check('max_tokens above the context', async () => {
  const error = await report.refusal(
    (error) => error instanceof OpenAI.BadRequestError, () => chat('Hello.', { max_tokens: report.MAX_TOKENS }))
  expect(error.code === 'context_length_exceeded', error)
})
await check('reasoning', async () => {
  const { message } = (await chat('Think.', {}, scripted)).choices[0]
  expect(message.content === 'Four.' && message.reasoning_content.includes('Two and two'), message)
})
