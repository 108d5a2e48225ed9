// A tool-calling turn with openai-node, over chat completions.

import OpenAI from "openai"
import { CITY, QUESTION, RESULT, TIMEOUT_MS, lead } from "./transcript.mjs"

const TOOL = { type: "function", function: { name: "weather", strict: true, parameters: CITY } }

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "key", timeout: TIMEOUT_MS })

async function say(scenario, messages, choice, transcript) {
  const asked = {
    model: scenario.model,
    messages,
    tools: [TOOL],
    tool_choice: choice,
    temperature: scenario.temperature,
    max_tokens: 60,
  }
  const patience = { maxRetries: scenario.retries }
  if (scenario.stream) {
    const options = { stream: true, stream_options: { include_usage: true } }
    return await read(await client.chat.completions.create({ ...asked, ...options }, patience), transcript)
  }
  const reply = await client.chat.completions.create(asked, patience)
  const { message, finish_reason } = reply.choices[0]
  transcript.add("text", message.content)
  transcript.add("finish", finish_reason)
  transcript.add("tokens", reply.usage?.completion_tokens)
  for (const call of message.tool_calls ?? []) transcript.add("call", call.function)
  return message.tool_calls?.[0]
}

async function read(stream, transcript) {
  let call
  for await (const event of stream) {
    transcript.add("tokens", event.usage?.completion_tokens)
    for (const { delta, finish_reason } of event.choices) {
      transcript.add("text", delta.content)
      for (const part of delta.tool_calls ?? []) {
        if (part.id) call = { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } }
        call.function.arguments += part.function.arguments ?? ""
        transcript.add("arguments", part.function.arguments)
      }
      transcript.add("finish", finish_reason)
    }
  }
  transcript.add("call", call?.function)
  return call
}

await lead(async (scenario, transcript) => {
  const messages = [{ role: "user", content: QUESTION }]
  const call = await say(scenario, messages, "required", transcript)
  messages.push({ role: "assistant", content: null, tool_calls: [call] })
  messages.push({ role: "tool", tool_call_id: call.id, content: RESULT })
  await say(scenario, messages, "none", transcript)
})
