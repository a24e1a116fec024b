//! Short templates in the form of published ones.

pub const MISTRAL_SMALL: &str = "\
{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]\
{% elif m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]\
{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}\
[/TOOL_RESULTS]{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}\
{{ raise_exception('nine letters') }}{% endif %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]\
{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}";

pub const MINISTRAL: &str = "\
{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% if tools %}\
[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]\
{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{% if m.content is string %}{{ m.content }}\
{% else %}{% for b in m.content %}{% if b['type'] == 'thinking' %}[THINK]{{ b['thinking'] }}[/THINK]{% else %}{{ b['text'] }}\
{% endif %}{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]\
{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}{{ eos_token }}\
{% endif %}{% endfor %}";

pub const GEMMA_4: &str = "\
{% macro arguments(all) %}{% for key, value in all | dictsort %}{{ key }}:{% if value is string %}<|\"|>{{ value }}<|\"|>\
{% else %}{{ value }}{% endif %}{{ ',' if not loop.last }}{% endfor %}{% endmacro %}\
{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}{% if m.role == 'tool' %}\
<|tool_response>response:{{ m.name }}{value:<|\"|>{{ m.content }}<|\"|>}<tool_response|>{% else %}\
{% if role != 'model' or loop.previtem.role != 'tool' %}<|turn>{{ role }}\n{% endif %}\
{% if m.role == 'system' %}{% if enable_thinking %}<|think|>\n{% endif %}{{ m.content }}{% for t in tools or [] %}<|tool>declaration:\
{{ t.function.name }}{}<tool|>{% endfor %}<turn|>\n{% elif m.tool_calls %}{% if m.reasoning_content %}<|channel>thought\n\
{{ m.reasoning_content }}\n<channel|>{% endif %}{% for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{{ '{' }}\
{{ arguments(c.function.arguments) if c.function.arguments is mapping else c.function.arguments }}{{ '}' }}<tool_call|>{% endfor %}{% else %}{{ m.content }}<turn|>\n{% endif %}{% endif %}{% endfor %}\
{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}";

pub const KIMI: &str = "\
{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}\
<|im_{{ m.role if m.role in ['user', 'assistant'] else 'system' }}|>{{ m.role }}<|im_middle|>{% if m.role == 'assistant' %}\
<think>{{ m.reasoning_content }}</think>{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}\
{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}\
<|tool_call_argument_begin|>{{ c.function.arguments | tojson if c.function.arguments is mapping else c.function.arguments }}\
<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}";

pub const MINIMAX: &str = "\
]~!b[{% for m in messages %}{% if m.role == 'system' %}]~b]system\n{{ m.content }}{% for t in tools or [] %}<tool>\
{{ t.function | tojson }}</tool>{% endfor %}[e~[\n{% elif m.role == 'user' %}]~b]user\n{{ m.content }}[e~[\n\
{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}]~b]tool{% endif %}{{ '\\n' }}<response>{{ m.content }}</response>\
{% if loop.last or loop.nextitem.role != 'tool' %}[e~[\n{% endif %}{% else %}]~b]ai\n{% if m.reasoning_content %}<think>\n\
{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% if m.tool_calls %}{{ '\\n' }}<minimax:tool_call>\n{% for c in m.tool_calls %}\
<invoke name=\"{{ c.function.name }}\">{{ '\\n' }}{% for k, v in c.function.arguments.items() %}<parameter name=\"{{ k }}\">\
{{ v if v is string else v | tojson }}</parameter>{{ '\\n' }}{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n\
{% endif %}{% endfor %}{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}";

pub const DEEPSEEK_V32: &str = "\
{% set d = '｜DSML｜' %}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}\
{% elif m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '\\n\\n' }}<function_results>\
{% endif %}{{ '\\n' }}<result>{{ m.content }}</result>{% if loop.last or loop.nextitem.role != 'tool' %}{{ '\\n' }}</function_results>{% endif %}\
{% else %}{{ '<｜Assistant｜>' if loop.previtem.role == 'user' else '\\n\\n' }}<think>{{ m.reasoning_content }}</think>{{ m.content }}\
{% if m.tool_calls %}{{ '\\n\\n<' + d }}function_calls>{{ '\\n' }}{% for c in m.tool_calls %}{{ '<' + d }}invoke name=\"{{ c.function.name }}\">{{ '\\n' }}\
{% for k, v in c.function.arguments.items() %}{{ '<' + d }}parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">\
{{ v if v is string else v | tojson }}{{ '</' + d }}parameter>{{ '\\n' }}{% endfor %}{{ '</' + d }}invoke>{{ '\\n' }}{% endfor %}\
{{ '</' + d }}function_calls>{% endif %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}\
{{ '<｜Assistant｜>' if messages[-1].role == 'user' else '\\n\\n' }}{{ '<think>' if thinking else '<think></think>' }}{% endif %}";

pub const GLM_47: &str = "\
[gMASK]<sop>{% for m in messages %}{% if m.role == 'system' %}<|system|>{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ m.content }}\
{% elif m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}\
<tool_response>{{ m.content }}</tool_response>{% else %}<|assistant|>{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '</think>' }}\
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>\
{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|><think>{% endif %}";

pub const QWEN_35: &str = "\
{% for m in messages %}{% if m.role == 'system' %}<|im_start|>system\n{% for t in tools or [] %}{{ t | tojson }}{% endfor %}\n\n{{ m.content }}<|im_end|>\n\
{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>\
{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n\
{% else %}<|im_start|>assistant\n<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}{% for c in m.tool_calls or [] %}\
{{ '\\n\\n' if loop.first and m.content else ('' if loop.first else '\\n') }}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}\
<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";

pub const LLAMA_4_PYTHON: &str = "\
{% for m in messages %}{% if m.role == 'tool' %}<|header_start|>ipython<|header_end|>\n\n{{ m.content | tojson }}<|eot|>\
{% else %}<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content }}{% if m.role == 'system' %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% endif %}\
{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}({% for k in c.function.arguments %}{{ k }}=\"{{ c.function.arguments[k] }}\"\
{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|eot|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}";

pub const FUNCTION_GEMMA: &str = "\
{% for m in messages %}{% if m.role == 'tool' %}<start_function_response>response:{{ m.name }}{value:<escape>{{ m.content }}<escape>}<end_function_response>\
{% else %}{% if m.role != 'assistant' or loop.previtem.role != 'tool' %}<start_of_turn>{{ 'model' if m.role == 'assistant' else ('developer' if m.role == 'system' else m.role) }}\n{% endif %}{{ m.content }}\
{% if m.role == 'system' %}{% for t in tools or [] %}<start_function_declaration>declaration:{{ t.function.name }}<end_function_declaration>{% endfor %}{% endif %}\
{% for c in m.tool_calls or [] %}<start_function_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | dictsort %}{{ k }}:\
{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v }}{% endif %}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<end_function_call>{% endfor %}\
{% if not m.tool_calls %}<end_of_turn>\n{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<start_of_turn>model\n{% endif %}";
