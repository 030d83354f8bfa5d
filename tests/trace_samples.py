"""A few rows of every trace format, written for the tests."""

import json

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:50.9951691,879,55"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01+00:00,2399,6\n"
    "2024-05-10 02:00:02.5+02:00,76,15\n"
)
BURSTGPT_6 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,1087,230,1317,API log\n"
    "45,ChatGPT,100,0,100,API log\n"
)
BURSTGPT_8 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440109.0,,3,GPT-4,906,0,906,API log\n"
    "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
    "19440112.5,,4,ChatGPT,10,20,30,API log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [0]}\n'
)
BAILIAN = (
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, '
    '"output_length": 5, "type": "text", "turn": 1, "hash_ids": [4, 5, 6]}\n'
    '{"chat_id": 8, "parent_chat_id": 7, "timestamp": 62.5, "input_length": 48, '
    '"output_length": 9, "type": "search", "turn": 2, "hash_ids": [4, 9, 6]}\n'
    '{"chat_id": 9, "parent_chat_id": 2, "timestamp": 62.5, "input_length": 16, '
    '"output_length": 9, "type": "text", "turn": 3, "hash_ids": [6]}\n'
)
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n"
VIDUR_LENGTHS = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n"
)
SERVING_SIM_LEAN = (
    '{"input_toks":33,"output_toks":20,"arrival_time_ns":46926808,"hash_ids":[0,1,2]}\n'
    '{"input_toks":16,"output_toks":2,"arrival_time_ns":46926809,"hash_ids":[0]}\n'
)
VLLM_CUSTOM = (
    '{"prompt": "What is a queue?", "output_tokens": 12}\n'
    '{"prompt": "And Little\'s law?", "output_tokens": 30}\n'
)
SHAREGPT = json.dumps(
    [
        {"id": "a", "conversations": [{"from": "human", "value": "Hi there"}]},
        {
            "id": "b",
            "conversations": [
                {"from": "human", "value": "What is M/M/1?"},
                {"from": "gpt", "value": "A queue with one server."},
                {"from": "human", "value": "Thanks"},
            ],
        },
        {"id": "c", "conversations": [{"value": "Say nothing"}, {"value": ""}]},
    ]
)
OWN = (
    "arrival_s,prompt_tokens,output_tokens,max_tokens,priority,deadline_s,tenant,session_id,"
    "prefix_hash_ids,hash_block_tokens\n"
    "0.000000001,20,5,,1,2.5,acme,s1,1 2,16\n"
    "3,30.0,6,64,,,,,,16\n"
)
CLIENT_RESULTS = json.dumps(
    {
        "num_prompts": 3,
        "start_times": [107.5, 105.0, 106.0],
        "input_lens": [20, 30, 40],
        "output_lens": [3, 2, 0],
        "ttfts": [0.5, 0.25, 0.0],
        "itls": [[0.5, 1.0], [0.125], []],
        "errors": ["", "", "refused"],
    }
)
SESSIONS = (
    '{"session": "a", "arrival_s": 0.5, "shared": [["system", 40]], "new_tokens": 8, '
    '"output_tokens": 5, "tool": "search"}\n'
    '{"session": "a", "tool_s": 1.5, "new_tokens": 7, "output_tokens": 3}\n'
    '{"session": "b", "arrival_s": 2, "turn": 1, "new_tokens": 9, "output_tokens": 4}\n'
    '{"session": "b", "turn": 2, "parents": [1], "new_tokens": 1, "output_tokens": 2}\n'
    '{"session": "b", "turn": 3, "parents": [1], "new_tokens": 2, "output_tokens": 6}\n'
    '{"session": "b", "turn": 4, "parents": [1, 2, 3], "think_s": 3, "new_tokens": 1, '
    '"output_tokens": 1}\n'
)
SAMPLES = {
    "client_results": CLIENT_RESULTS,
    "azure": AZURE_2023,
    "burstgpt": BURSTGPT_6,
    "bailian": BAILIAN,
    "mooncake": MOONCAKE,
    "vidur": VIDUR,
    "llmservingsim": SERVING_SIM_LEAN,
    "sharegpt": SHAREGPT,
    "vllm_custom": VLLM_CUSTOM,
    "schedlab": OWN,
    "sessions": SESSIONS,
}
