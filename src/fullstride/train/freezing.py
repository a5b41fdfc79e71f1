"""Which layers do not train? Those that the recipe freezes, and at first all but the classifier."""

from fullstride.nets.backbone import Backbone
from fullstride.train.optimizer import NORMS, frozen_names
from fullstride.train.recipe import Recipe


class Freezing:
    """Takes gradients from the parameters that do not train, and updates from their batch norms.

    Which ones is a function of the step alone, so that a resumed run goes on with the same. A
    frozen batch norm uses the statistics that it has and does not change them, as do all of them
    with the recipe's `frozen_statistics`, whose gains and biases train.
    """

    def __init__(self, net: Backbone, recipe: Recipe, steps_per_epoch: int):
        self.net, self.until = net, round(recipe.freeze_epochs * steps_per_epoch)
        never = frozen_names(net, recipe)
        at_first = never
        if self.until:
            numbers = net.layer_numbers(coarse=True)
            last = max(numbers.values())
            at_first = never | {name for name, number in numbers.items() if number < last}
        names = {parameter: name for name, parameter in net.named_parameters()}
        if at_first.issuperset(names.values()):
            raise ValueError(
                "recipe.freeze_epochs trains the classifier alone, which recipe.frozen has: leave "
                "out one of them"
            )
        self.own = [each for each, name in names.items() if name in at_first]
        self.frozen = {True: at_first, False: never}
        self.norms = [
            (module, {names[each] for each in module.parameters()})
            for module in net.modules()
            if isinstance(module, NORMS)
        ]
        self.names, self.is_start = names, None
        self.keeps_statistics = recipe.frozen_statistics

    def apply(self, step: int) -> bool:
        """Freeze what does not train in `step`, from 0; whether that differs from the last call.

        It is called before every step, as `net.train()` sets the batch norms back.
        """
        is_start = step < self.until
        frozen = self.frozen[is_start]
        changes = is_start != self.is_start and bool(self.own)
        if changes:
            for parameter in self.own:
                parameter.requires_grad_(self.names[parameter] not in frozen)
        for norm, names in self.norms if self.own or self.keeps_statistics else ():
            norm.train(self.net.training and not (names & frozen or self.keeps_statistics))
        self.is_start = is_start
        return changes
