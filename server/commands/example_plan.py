"""A commented plan to start from, printed by `distrans-server federation create --example`; a test parses it."""

EXAMPLE_PLAN = """\
# A federation's plan. Every setting except `name` and `classes` has a default, which is shown here. Settings that the
# preset chooses are commented out: another preset chooses other values.
name = "lung-nodules"                  # letters, digits, . _ -
classes = ["benign", "malignant"]      # matched with the sites' class names
preset = "offset-dropout"              # ours; "paper": the published settings; others in docs/plan-reference.md
seed = 0                               # determines everything random
averaging = "uniform"                  # or "samples": weight sites by their number of images

[image]                                # the model's input; sites convert their images to it
channels = 3
height = 64
width = 64
mean = [0.5]                           # of pixels in 0 … 1; one value, or one per channel
std = [0.5]

[model]
backbone = "lenet"                     # lenet, alexnet, resnet18, resnet50, cnn, or "package.module:function"
# activation = "relu"                  # lenet only; "none" as in the authors' code
# initialization = "torch"             # lenet only; "kaiming" as in the authors' code
weights = "random"                     # or "imagenet" (torchvision's), or "file" (given with --weights)
# dense_dim = 256                      # width of a dense layer before the logits; unset: the backbone's default

[method]
name = "distrans"                      # or fedavg, pfedme, moon, …, each with its own keys: docs/methods.md
alpha = 0.3                            # blend factor of the offset
input_channels = "double"              # "single" is an ablation
update_rule = "alternating"            # Algorithm 1; "joint": the authors' code, and faster
# offset_optimizer = "adam"            # or "sgd", "sign-sgd"
# offset_lr = 0.05                     # unset: 0.001 (sgd), 0.05 (adam), 0.02 (sign-sgd); 0 freezes the offsets
# offset_bound = 0.3                   # how far an offset may move from its start …
bounded_clients = "single-class"       # … at sites with one class; or "all", "none"
# offset_dropout = 0.5                 # share of the model's steps without the offset, to keep what sites share
# offset_loss = "prior"                # "plain": the offset also learns which classes a site has
offset_gradient = "mean"               # or "sum" over the images of a batch
# offset_init = "zeros"                # or "auto", "uniform", "imagenet", "normal", "generator"
shared_offset = false                  # for control experiments: one offset for all sites
offset_aggregation = "auto"            # "network" if DH < dh_threshold, else "none"; or "none", "mean", "network"
# dh_threshold = 0.0                   # above 0, the network replaces what the offsets have learned
offset_backup = false                  # true: the coordinator keeps a copy for sites that lose theirs
batchnorm = "two-passes"               # or "joint", or "separate" layers per channel
batchnorm_statistics = "averaged"      # or "private": stay at each site
shared_dropout = false                 # true: drop the same features in both channels

[method.generator]                     # the offset aggregation network
inputs = "embedding"                   # or "embedding+offset", as in the paper's text
optimizer = "sgd"                      # or "adam"
lr = 0.01
steps = 1                              # regression steps per client and round
reduction = "mean"                     # or "sum"
mix = 1.0                              # mix × network output + (1 − mix) × the client's own offset
hidden = 100
width = 512

[training]                             # at each site, in each round
batch_size = 32
# epochs = 2
# lr = 0.05                            # lower it if training diverges, as fine-tuned networks may
momentum = 0.0
weight_decay = 0.0
# clip_norm = 2.5                      # maximum norm of the gradient
update_compression = "none"            # upload fewer bits per weight: bf16, int8 or int4

[rounds]
count = 100
min_clients = 1                        # rounds start when this many sites have joined and are present …
join_deadline_s = 604800.0             # … which may take this long, as may connecting in each round
absent_after_s = 1800.0                # silence after which a site is absent: not sampled, nor waited for beyond quorum
sample_fraction = 1.0                  # share of the sites sampled for each round
deadline_s = 21600.0                   # time to upload, once a quorum of the round's sites has connected
quorum = 0.66                          # share of the updates that is enough at the deadline: 2 of 3, 4 of 5
upload_idle_s = 60.0                   # past the deadline an upload may go on while bytes arrive this often …
upload_grace_s = 21600.0               # … for at most this long
# target_accuracy = 0.95               # stop early at this pooled accuracy
# patience = 10                        # stop after this many rounds without improvement
"""
