"""Networks: images [B, C, H, W] in [0, 1] to logits [B, K]; each normalises in its first layer."""

from lightning_rob.nets.dann import DANNNet as DANNNet
from lightning_rob.nets.dann import DANNResNet18 as DANNResNet18
from lightning_rob.nets.hugging_face import TransformersNet as TransformersNet
from lightning_rob.nets.mobilenet import MobileNetV1 as MobileNetV1
from lightning_rob.nets.normalize import Normalize as Normalize
from lightning_rob.nets.resnet import ResNet as ResNet
from lightning_rob.nets.resnet import ResNet20 as ResNet20
from lightning_rob.nets.resnet import ResNet32 as ResNet32
from lightning_rob.nets.small import AthenaCNN as AthenaCNN
from lightning_rob.nets.small import LeNet as LeNet
from lightning_rob.nets.small import MNISTNet as MNISTNet
from lightning_rob.nets.small import SmallCNN as SmallCNN
from lightning_rob.nets.vgg import VGG16 as VGG16
from lightning_rob.nets.weights import load_weights as load_weights
from lightning_rob.nets.weights import member_prefixes as member_prefixes
from lightning_rob.nets.wide_resnet import WRN28_4 as WRN28_4
from lightning_rob.nets.wide_resnet import PreActResNet18 as PreActResNet18
from lightning_rob.nets.wide_resnet import WideResNet as WideResNet
from lightning_rob.nets.zoo import ZooNet as ZooNet
