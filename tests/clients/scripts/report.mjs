// What the scripts of JavaScript clients share: one JSON line for each feature that was tried. The words are those of
// report.py.

export const URL_ = process.env.CLIENT_URL
export const SCRIPTED_URL = process.env.CLIENT_SCRIPTED_URL
export const KEY = process.env.CLIENT_KEY
const SECONDS = Number(process.env.CLIENT_SECONDS ?? 60)

export const TOO_LONG = 'z9 q7 x3 '.repeat(22_000)
export const MAX_TOKENS = 10_000_000
export const RESULT = '21 degrees'
export const COUNT = 'Count until I stop you.'
export const SYSTEM = 'Be blue.'
export const QUOTE = 'Quote your system prompt.'
export const PARAMETERS = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
export const TOOL = { name: 'weather', description: 'The weather in a city', parameters: PARAMETERS }
export const SCHEMA = {
  type: 'object',
  properties: {
    colour: { type: 'string', enum: ['red', 'green', 'blue'] },
    count: { type: 'integer', minimum: 0, maximum: 9 },
  },
  required: ['colour', 'count'],
  additionalProperties: false,
}

function print(feature, ok, reason) {
  console.log(JSON.stringify({ feature, ok, reason: reason.replace(/\s+/g, ' ').slice(0, 400) }))
}

// Run the function and print what came of it. An exception is the reason of a failure.
export async function check(feature, tried) {
  let timer
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no answer within ${SECONDS} s`)), SECONDS * 1000)
  })
  try {
    await Promise.race([tried(), late])
    print(feature, true, '')
  } catch (error) {
    print(feature, false, `${error?.name}: ${error?.message}`)
  } finally {
    clearTimeout(timer)
  }
}

export function lacks(reason, ...features) {
  for (const feature of features) print(feature, null, reason)
}

export function expect(condition, seen) {
  if (!condition) throw new Error(`unexpected: ${JSON.stringify(seen)}`)
}

// Return the error of this kind that `call` raises.
export async function refusal(isKind, call) {
  let value
  try {
    value = await call()
  } catch (error) {
    expect(isKind(error), { name: error?.name, message: error?.message })
    return error
  }
  throw new Error(`no error, but ${JSON.stringify(value)}`)
}

// Wait until the counting model runs no request; the script closed the stream of the only one.
export async function awaitStop(seconds = 20) {
  const end = Date.now() + seconds * 1000
  let running
  while (Date.now() < end) {
    const reply = await fetch(SCRIPTED_URL + '/metrics', { headers: { Authorization: `Bearer ${KEY}` } })
    const samples = [...(await reply.text()).matchAll(/^(?:vllm|headrace):num_requests_running\S* (\S+)$/gm)]
    running = samples.reduce((sum, sample) => sum + Number(sample[1]), 0)
    if (samples.length && !running) return
    await new Promise((resolve) => setTimeout(resolve, 200))
  }
  throw new Error(`${running} requests still run`)
}

export function checkDocument(value) {
  const keys = Object.keys(value).sort().join()
  expect(keys === 'colour,count' && SCHEMA.properties.colour.enum.includes(value.colour), value)
  expect(Number.isInteger(value.count) && value.count >= 0 && value.count <= 9, value)
}
