"""Short `--help` pages of Lightning's own commands, printed without importing torch."""

COMMON = """\
  --config FILE               a recipe or mix-in: demo, or a file; later ones override
  CHECKPOINT                  {checkpoint}
  --model.NAME=V              change the recipe, as in --model.attack.steps=20
  --data.NAME=V               the same for the data: --data.eval_batch_size=200"""
ATTACKS = """\
  --trainer.callbacks+=FILE   plug in attacks and others: arc, or a file of yours"""
TRAINER = """\
  --trainer.accelerator=NAME  cpu, gpu, auto; and .devices=N .num_nodes=N
  --seed_everything=N         of all randomness, in training and prediction (0)"""
FAIL_UNDER = "  --fail_under NAME=VALUE     exit code 1 if below it: robust/worst=0.40"
SPECIFIC = {
    "fit": """\
  --trainer.max_epochs=N      and .precision=bf16-mixed .accumulate_grad_batches=N
  --test_after_fit=true       test the trained model, and print the table
  --seeds 0..4                a training and test each, their mean and interval;
                              --workers=N or --ray=N side by side""",
    "validate": FAIL_UNDER,
    "test": FAIL_UNDER,
    "predict": "",
}
SAFETY = """\
  --rank_timeout=SECONDS      give up when another process is silent for so long
  --allow-import PREFIX       let class_path name classes of another package"""
EXAMPLES = {
    "fit": """\
  lightning-rob fit --config demo
  lightning-rob fit --config bat_cifar10_resnet20_linf \\
      --trainer.callbacks+=arc --model.attack.threat.eps=4/255""",
    "validate": """\
  lightning-rob validate last.ckpt \\
      --trainer.callbacks+=pgd""",
    "test": """\
  lightning-rob test last.ckpt \\
      --trainer.callbacks+=rec_suite
  lightning-rob test last.ckpt --fail_under robust/worst=0.40 \\
      --trainer.callbacks+=arc --data.eval_batch_size=200""",
    "predict": """\
  lightning-rob predict last.ckpt --data.eval_batch_size=200""",
}
MORE = """\
  --help all                  every option
  --model.help BAT            the arguments of a class; --data.help CIFAR10
  --print_config              the whole configuration that would be run"""


def run_help(command: str, summary: str) -> str:
    """Return the short help of fit, validate, test or predict."""
    checkpoint = "go on with its model and data" if command == "fit" else "its recipe is in it"
    parts = [COMMON.format(checkpoint=checkpoint), ATTACKS * (command != "predict"), TRAINER]
    options = "\n".join(filter(None, [*parts, SPECIFIC[command], SAFETY]))
    given = "--config RECIPE" if command == "fit" else "CHECKPOINT"
    usage = f"usage: lightning-rob {command} {given} [options]"
    paragraphs = [usage, f"{summary[0].upper()}{summary[1:]}.", options, MORE, EXAMPLES[command]]
    return "\n\n".join(paragraphs)
