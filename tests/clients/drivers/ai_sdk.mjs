// A tool-calling turn with Vercel's AI SDK and its provider for OpenAI-compatible servers.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai"
import { CITY, QUESTION, RESULT, lead } from "./transcript.mjs"

const provider = createOpenAICompatible({
  name: "gateway",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "key",
  includeUsage: true,
})
const weather = tool({ inputSchema: jsonSchema(CITY), strict: true, execute: () => RESULT })

function question(scenario) {
  return {
    model: provider(scenario.model),
    prompt: QUESTION,
    tools: { weather },
    temperature: scenario.temperature,
    maxOutputTokens: 60,
    maxRetries: scenario.retries,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  }
}

async function whole(scenario, transcript) {
  const { steps } = await generateText(question(scenario))
  for (const step of steps) {
    for (const call of step.toolCalls) transcript.add("call", [call.toolName, call.input])
    for (const result of step.toolResults) transcript.add("result", [result.toolName, result.output])
    transcript.add("text", step.text)
    transcript.add("finish", [step.finishReason])
    transcript.add("tokens", step.usage.outputTokens)
  }
}

async function streamed(scenario, transcript) {
  let failed
  const { fullStream } = streamText({ ...question(scenario), onError: () => {} })
  try {
    for await (const part of fullStream) {
      if (part.type === "text-delta") transcript.add("text", part.text)
      if (part.type === "tool-call") transcript.add("call", [part.toolName, part.input])
      if (part.type === "tool-result") transcript.add("result", [part.toolName, part.output])
      if (part.type === "finish-step") transcript.add("finish", [part.finishReason])
      if (part.type === "finish-step") transcript.add("tokens", part.usage.outputTokens)
      if (part.type === "error") failed ??= part.error
    }
  } catch (error) {
    failed ??= error // what came as a part of the stream came first
  }
  if (failed) throw failed
}

globalThis.AI_SDK_LOG_WARNINGS = false
await lead((scenario, transcript) => (scenario.stream ? streamed : whole)(scenario, transcript))
