// Vercel's ai with @ai-sdk/openai, which speaks the Responses API and refers to stored items by their ids.
import { createOpenAI } from '@ai-sdk/openai'
import * as ai from 'ai'
import { z } from 'zod'
import * as report from './report.mjs'
import { check, expect } from './report.mjs'

const bodies = []
const recorded = (url, options) => (bodies.push(options.body), fetch(url, options))
const provider = (url, apiKey) => createOpenAI({ baseURL: url + '/v1', apiKey, fetch: recorded })
const open = provider(report.URL_, 'none')
const scripted = provider(report.SCRIPTED_URL, report.KEY)
const common = { maxRetries: 0 }
const text = (prompt, more = {}, model = open('builtin')) =>
  ai.generateText({ ...common, model, prompt, maxOutputTokens: 20, ...more })
const say = (prompt, more = {}) => text(prompt, { maxOutputTokens: 500, ...more }, scripted('scripted'))
const calls = []
const tools = {
  weather: ai.tool({
    description: 'The weather in a city',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (calls.push(city), report.RESULT),
  }),
}

await check('chat', async () => {
  const reply = await text('Say hello.')
  expect(reply.text, 'no text')
  const messages = [{ role: 'user', content: 'Say hello.' }, ...reply.response.messages, { role: 'user', content: 'Again.' }]
  const second = await ai.generateText({ ...common, model: open('builtin'), messages, maxOutputTokens: 20 })
  expect(second.text && bodies.at(-1).includes('item_reference'), bodies.at(-1))
})
await check('stream', async () => {
  const parts = []
  const reply = ai.streamText({ ...common, model: scripted('scripted'), prompt: 'Hello.' })
  for await (const part of reply.textStream) parts.push(part)
  expect(parts.length > 2 && parts.join('') === 'Hello from the script.', parts)
})
await check('system prompt', async () => {
  expect((await say(report.QUOTE, { system: report.SYSTEM })).text.includes(report.SYSTEM), 'not quoted')
})
await check('tool call', async () => {
  const reply = await say('How warm is Rome?', { tools })
  expect(calls.join() === 'Rome' && reply.finishReason === 'tool-calls', calls)
})
await check('tool result', async () => {
  const reply = await say('How warm is Rome?', { tools, stopWhen: ai.stepCountIs(3) })
  expect(reply.text.includes(report.RESULT) && reply.steps.length === 2, reply.steps)
})
await check('structured output', async () => {
  const schema = z.strictObject({ colour: z.enum(['red', 'green', 'blue']), count: z.int().min(0).max(9) })
  const output = ai.Output.object({ schema })
  const reply = await text('Name a colour.', { maxOutputTokens: 200, output })
  report.checkDocument(reply.output)
})
await check('embeddings', async () => {
  const { embeddings } = await ai.embedMany({ ...common, model: open.embedding('builtin'), values: ['A cat.', 'A dog.'] })
  expect(embeddings.length === 2 && embeddings[0].length > 1, embeddings)
})
await check('any model name', async () => expect((await text('Say hello.', {}, open('gpt-4o-mini'))).text, 'no text'))

const status = (number) => (error) => ai.APICallError.isInstance(error) && error.statusCode === number
await check('unknown model', () => report.refusal(status(404), () => text('Hello.', {}, scripted('none'))))
await check('context overflow', async () => {
  const error = await report.refusal(status(400), () => text(report.TOO_LONG))
  expect(error.message.includes('maximum context length'), error.message)
})
await check('wrong key', () => report.refusal(
  status(401), () => text('Hello.', {}, provider(report.SCRIPTED_URL, 'wrong')('scripted'))))
await check('usage', async () => {
  const { usage } = await text('Say hello.')
  expect(usage.inputTokens && usage.outputTokens, usage)
})
await check('cancel', async () => {
  const stop = new AbortController()
  const reply = ai.streamText({ ...common, model: scripted('scripted'), prompt: report.COUNT, abortSignal: stop.signal })
  let seen = 0
  for await (const part of reply.textStream) if (part && ++seen === 5) stop.abort()
  await report.awaitStop()
})
await check('max_tokens above the context', () => report.refusal(
  status(400), () => text('Hello.', { maxOutputTokens: report.MAX_TOKENS })))
report.lacks('it reads summaries of reasoning only; models served here give the reasoning itself', 'reasoning')
