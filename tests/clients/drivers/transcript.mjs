// What a client told its program, in order: the part that the Node drivers share. See transcript.py.

export const TIMEOUT_MS = 30_000
export const QUESTION = "How is the weather in Oslo?"
export const RESULT = "rain"
export const CITY = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Paris"] } },
  required: ["city"],
  additionalProperties: false,
}

export class Transcript {
  steps = []

  add(kind, value) {
    if (value === undefined || value === null || value === "") return
    const last = this.steps.at(-1)
    if (last && last[0] === kind && typeof value === "string") last[1] += value
    else this.steps.push([kind, value])
  }
}

function header(headers, name) {
  return (headers instanceof Headers ? headers.get(name) : headers?.[name]) ?? null
}

function describe(error) {
  return {
    class: error.name === "Error" ? error.constructor.name : error.name,
    status: error.status ?? error.statusCode ?? null,
    code: error.code ?? null,
    retry_after: header(error.headers ?? error.responseHeaders, "retry-after"),
    message: error.message,
  }
}

export async function lead(talk) {
  const told = {}
  for (const scenario of JSON.parse(process.argv[3])) {
    const transcript = new Transcript()
    let error = null
    try {
      await talk(scenario, transcript)
    } catch (raised) {
      error = describe(raised)
    }
    told[scenario.name] = { steps: transcript.steps, error }
  }
  process.stdout.write(JSON.stringify(told) + "\n")
}
