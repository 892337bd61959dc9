// The @anthropic-ai/sdk package.
import Anthropic from '@anthropic-ai/sdk'
import * as report from './report.mjs'
import { check, expect } from './report.mjs'

const client = new Anthropic({ baseURL: report.URL_, apiKey: 'none', maxRetries: 0 })
const at = { baseURL: report.SCRIPTED_URL, maxRetries: 0 }
const scripted = new Anthropic({ ...at, apiKey: report.KEY })
const tools = [{ name: 'weather', description: 'The weather in a city', input_schema: report.PARAMETERS }]

function body(text, more = {}, server = client) {
  const model = server === client ? 'builtin' : 'scripted'
  return { model, messages: [{ role: 'user', content: text }], max_tokens: server === client ? 20 : 300, ...more }
}
const message = (text, more, server = client) => server.messages.create(body(text, more, server))

await check('chat', async () => expect((await message('Say hello.')).content[0].text, 'no text'))
await check('stream', async () => {
  const parts = []
  const stream = scripted.messages.stream(body('Hello.', {}, scripted)).on('text', (text) => parts.push(text))
  const last = await stream.finalMessage()
  expect(parts.length > 2 && parts.join('') === last.content[0].text, parts)
})
await check('system prompt', async () => {
  const reply = await message(report.QUOTE, { system: report.SYSTEM }, scripted)
  expect(reply.content[0].text.includes(report.SYSTEM), reply)
})
const turns = [{ role: 'user', content: 'How warm is Rome?' }]
await check('tool call', async () => {
  const reply = await message('', { messages: turns, tools }, scripted)
  const call = reply.content.find((block) => block.type === 'tool_use')
  expect(call?.input.city === 'Rome' && reply.stop_reason === 'tool_use', reply)
  const result = { type: 'tool_result', tool_use_id: call.id, content: report.RESULT }
  turns.push({ role: 'assistant', content: reply.content }, { role: 'user', content: [result] })
})
await check('tool result', async () => {
  expect((await message('', { messages: turns, tools }, scripted)).content[0].text.includes(report.RESULT), 'no result')
  expect((await message('', { messages: turns, tools })).stop_reason, 'none')
})
await check('structured output', async () => {
  const output_config = { format: { type: 'json_schema', schema: report.SCHEMA } }
  report.checkDocument(JSON.parse((await message('A colour.', { output_config, max_tokens: 200 })).content[0].text))
})
report.lacks('the API has none', 'embeddings')
await check('any model name', async () => {
  expect((await message('Say hello.', { model: 'claude-opus-4-8' })).model === 'builtin', 'another name in the reply')
})
await check('unknown model', () => report.refusal(
  (error) => error instanceof Anthropic.NotFoundError, () => message('Hello.', { model: 'none' }, scripted)))
await check('context overflow', async () => {
  const error = await report.refusal(
    (error) => error instanceof Anthropic.BadRequestError, () => message(report.TOO_LONG))
  expect(error.message.includes('prompt is too long'), error.message)
})
await check('wrong key', () => report.refusal(
  (error) => error instanceof Anthropic.AuthenticationError,
  () => message('Hello.', {}, new Anthropic({ ...at, apiKey: 'wrong' }))))
await check('usage', async () => {
  const { usage } = await message('Say hello.')
  expect(usage.input_tokens + usage.cache_read_input_tokens && usage.output_tokens, usage)
})
await check('cancel', async () => {
  const stream = scripted.messages.stream(body(report.COUNT, { max_tokens: 100_000 }, scripted))
  let seen = 0
  for await (const event of stream) if (event && ++seen === 5) break
  stream.abort()
  await report.awaitStop()
})
await check('max_tokens above the context', async () => {
  const stream = client.messages.stream(body('Say hello.', { max_tokens: report.MAX_TOKENS }))
  for await (const event of stream) if (event.type === 'content_block_delta') return
  expect(false, 'no text')
})
await check('reasoning', async () => {
  const thinking = { type: 'enabled', budget_tokens: 1024 }
  const reply = await message('Think.', { thinking, max_tokens: 2000 }, scripted)
  expect(reply.content.map((block) => block.type).join() === 'thinking,text', reply)
})
