"""What the arguments of verbs name: containers, pods and images, with completion in shells."""
