"""A commented plan to start from; `distrans-server federation create --example` prints it, a test reads it."""

EXAMPLE_PLAN = """\
# A federation's plan. Everything but `name` and `classes` has a default, which is shown here. What the preset sets is
# commented out: another preset sets it differently.
name = "lung-nodules"                  # letters, digits, . _ -
classes = ["benign", "malignant"]      # the sites' class names are matched with these
preset = "learned-offset"              # offsets that learn; "paper": the published settings; docs/plan-reference.md
seed = 0                               # everything random follows from it
averaging = "uniform"                  # or "samples": weigh sites by their number of images

[image]                                # what the model sees; sites convert their images to it
channels = 3
height = 64
width = 64
mean = [0.5]                           # of pixels in 0 … 1; one value, or one per channel
std = [0.5]

[model]
backbone = "lenet"                     # lenet, alexnet, resnet18, resnet50, cnn, or "package.module:function"
# activation = "relu"                  # lenet only; "none" as the authors' code has it
weights = "random"                     # or "imagenet" (torchvision's), or "file" (given with --weights)
# dense_dim = 256                      # width of a dense layer before the logits; unset: the backbone's own

[method]
name = "distrans"                      # docs/methods.md has the others: fedavg, pfedme, moon … with keys of their own
alpha = 0.3                            # blend factor of the offset
input_channels = "double"              # "single" is an ablation
update_rule = "alternating"            # Algorithm 1; "joint" is the authors' code, and faster
# offset_optimizer = "adam"            # or "sgd", "sign-sgd"
# offset_lr = 0.05                     # unset: 0.001 (sgd), 0.05 (adam), 0.02 (sign-sgd); 0 freezes the offsets
# offset_bound = 0.3                   # how far it may move from its start …
bounded_clients = "single-class"       # … at sites with one class; or at "all", or at "none"
offset_gradient = "mean"               # or "sum" over the images of a batch
# offset_init = "zeros"                # or "uniform", "imagenet", "normal", "generator"
shared_offset = false                  # a control: one offset for all
offset_aggregation = "auto"            # "network" below the threshold of DH, else "none"; or "none", "mean", "network"
# dh_threshold = 0.0                   # above 0, the network takes the place of what the offsets have learned
offset_backup = false                  # true: the coordinator keeps a copy, for a site that has lost its own
batchnorm = "two-passes"               # or "joint", or "separate" layers for each channel
batchnorm_statistics = "averaged"      # or "private": kept at each site
shared_dropout = false                 # true: the same features are left out in both channels

[method.generator]                     # the offset aggregation network
inputs = "embedding"                   # or "embedding+offset", as the paper's text has it
optimizer = "sgd"                      # or "adam"
lr = 0.01
steps = 1                              # regression steps per client and round
reduction = "mean"                     # or "sum"
mix = 1.0                              # mix × network output + (1 − mix) × the client's own offset
hidden = 100
width = 512

[training]                             # at each site, in each round
batch_size = 32
epochs = 1
lr = 0.005
momentum = 0.0
weight_decay = 0.0
# clip_norm = 10.0                     # largest norm of the gradient; unset: no clipping

[rounds]
count = 100
min_clients = 1                        # rounds begin when this many sites have joined and are not absent …
join_deadline_s = 604800.0             # … which may take this long, as may connecting in each round
absent_after_s = 1800.0                # silence until a site is absent: not chosen, nor waited for beyond a quorum
sample_fraction = 1.0                  # share of the sites chosen for each round
deadline_s = 21600.0                   # time for a round's uploads, once a quorum of its sites has connected
quorum = 0.66                          # share of the participants that is enough at the deadline: 2 of 3, 4 of 5
upload_idle_s = 60.0                   # an upload past the deadline may go on while bytes come at least so often …
upload_grace_s = 21600.0               # … and for at most so long
# target_accuracy = 0.95               # end early at this pooled accuracy
# patience = 10                        # end after so many rounds without improvement
"""
