// The official client for JavaScript. Arguments: the server's address, then the checks to run.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, ...names] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none" });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Say something about Paris." }];
const [short, long] = [16, 64];
const ask = (body) => client.chat.completions.create({ model, messages, temperature: 0, ...body });

const cities = ["Paris", "Oslo"];
const answers = ["yes", "no"];
const object = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});

const checks = {
  async chat() {
    const answer = await ask({ max_tokens: short });
    assert.equal(typeof answer.choices[0].message.content, "string");
    assert.ok(["stop", "length"].includes(answer.choices[0].finish_reason));
    assert.ok(answer.usage.completion_tokens <= short);
  },
  async stream() {
    const whole = await ask({ max_tokens: short });
    let text = "";
    for await (const chunk of await ask({ max_tokens: short, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, whole.choices[0].message.content);
  },
  async tool() {
    const parameters = object({ city: { type: "string", enum: cities } });
    const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
    const tool_choice = { type: "function", function: { name: "get_weather" } };
    const answer = await ask({ max_tokens: long, tools, tool_choice });
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    assert.ok(cities.includes(JSON.parse(call.function.arguments).city));
  },
  async schema() {
    const schema = object({ answer: { type: "string", enum: answers } });
    const json_schema = { name: "answer", schema, strict: true };
    const answer = await ask({ max_tokens: long, response_format: { type: "json_schema", json_schema } });
    assert.ok(answers.includes(JSON.parse(answer.choices[0].message.content).answer));
  },
};

let failed = false;
for (const name of names) {
  try {
    await checks[name]();
    console.log(`${name}: ok`);
  } catch (error) {
    failed = true;
    console.log(`${name}: ${error.name}: ${error.message}`);
  }
}
process.exit(failed ? 1 : 0);
