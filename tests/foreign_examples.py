"""A configuration of each trainer, by its documented keys: trainer -> files. Media are in `media`."""

SIMPLETUNER = {
    "config/config.json": """{
  "--model_family": "kandinsky5-image", "--model_flavour": "t2i-lite-sft", "--model_type": "lora", "--lora_rank": 4,
  "--output_dir": "output/models", "--data_backend_config": "config/multidatabackend.json",
  "--user_prompt_library": "config/user_prompt_library.json", "--train_batch_size": 2, "--max_train_steps": "2",
  "--checkpoint_step_interval": 2, "--learning_rate": "1e-4", "--lr_scheduler": "constant",
  "--optimizer": "optimi-adamw", "--gradient_checkpointing": "true", "--mixed_precision": "no",
  "--caption_dropout_probability": 0.1, "--flow_schedule_shift": 1.5, "--flow_schedule_auto_shift": "false",
  "--validation_resolution": "64x64", "--validation_num_inference_steps": 2, "--validation_step_interval": 2,
  "--validation_guidance": 5.0, "--validation_seed": 42, "--tracker_run_name": "my lora",
  "--hub_token": "hf_0123456789", "--offload_during_startup": true, "--report_to": "tensorboard"
}""",
    "config/multidatabackend.json": """[
  {"id": "photos", "type": "local", "dataset_type": "image", "instance_data_dir": "media",
   "cache_dir_vae": "cache/vae/photos", "caption_strategy": "textfile", "metadata_backend": "discovery",
   "resolution": 64, "resolution_type": "pixel_area", "minimum_image_size": 0, "crop": true, "crop_aspect": "square",
   "repeats": 10},
  {"id": "text-embeds", "type": "local", "dataset_type": "text_embeds", "default": true, "cache_dir": "cache/text"}
]""",
    "config/user_prompt_library.json": '{"cat_<token>": "a photo of <token>"}',
}
MUSUBI = {
    "train.sh": """#!/bin/bash
# the model
WEIGHTS=/weights
python wan_cache_latents.py --dataset_config other.toml --vae "$WEIGHTS/vae.safetensors"
accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 \\
    wan_train_network.py --task t2v-1.3B --dit "$WEIGHTS/wan2.1_t2v_1.3B_bf16.safetensors" \\
    --dataset_config dataset.toml --sdpa --mixed_precision no --gradient_checkpointing \\
    --optimizer_type adamw --learning_rate 2e-4 --optimizer_args "weight_decay=0.05" \\
    --max_train_steps 2 --save_every_n_steps 2 --network_module networks.lora_wan --network_dim 4 \\
    --timestep_sampling shift --discrete_flow_shift 3.0 --seed 42 \\
    --output_dir out --output_name motion --sample_prompts prompts.txt --sample_every_n_steps 2
python wan_generate_video.py --task t2v-14B --prompt "a clip" --lora_weight out/motion.safetensors
""",
    "dataset.toml": """
[general]
resolution = [64, 64]
caption_extension = ".txt"
enable_bucket = true

[[datasets]]
video_directory = "media"
cache_directory = "cache"
target_frames = [9]
frame_extraction = "head"
num_repeats = 3
""",
    "prompts.txt": "# validation\na clip of the sea --w 64 --h 64 --f 9 --d 7 --s 2 --l 5.0 --n blurry\n",
}
AI_TOOLKIT = {
    "job.yaml": """---
job: extension
config:
  name: my first
  process:
    - type: diffusion_trainer
      training_folder: output
      device: cpu
      trigger_word: p3r5on
      network: {type: lora, linear: 4, linear_alpha: 4}
      save: {dtype: float16, save_every: 2, max_step_saves_to_keep: 4}
      datasets:
        - folder_path: media
          caption_ext: txt
          caption_dropout_rate: 0.05
          cache_latents_to_disk: true
          num_repeats: 2
          resolution: [64]
      train:
        batch_size: 1
        steps: 2
        gradient_accumulation: 2
        train_unet: true
        train_text_encoder: false
        gradient_checkpointing: true
        noise_scheduler: flowmatch
        timestep_type: sigmoid
        optimizer: adamw
        lr: 1e-4
        dtype: fp32
      model: {name_or_path: Tongyi-MAI/Z-Image, arch: zimage, quantize: false, low_vram: false}
      sample:
        sampler: flowmatch
        sample_every: 2
        width: 64
        height: 64
        prompts: [a cat on a wall]
        neg: ""
        seed: 42
        walk_seed: true
        guidance_scale: 4
        sample_steps: 2
meta: {name: "[name]"}
"""
}
EXAMPLES = {
    "simpletuner": (SIMPLETUNER, "kandinsky5-image-t2i", 0),
    "musubi-tuner": (MUSUBI, "wan2.1-t2v", 0),
    "ai-toolkit": (AI_TOOLKIT, "z-image", 0),
}
