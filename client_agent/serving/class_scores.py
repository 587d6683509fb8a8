"""How each class is recognized, computed by scikit-learn."""

import numpy as np
from torch import Tensor

from client_agent.state.records import ClassScores

MAX_CLASSES = 1000  # with test images; a longer table would help nobody


def score_classes(
    probabilities: Tensor, labels: Tensor, classes: tuple[str, ...]
) -> tuple[list[ClassScores], list[tuple[str, str, int]]]:
    """Return sensitivity, specificity and one-vs-rest AUC of each class with test images, and the confusion matrix.

    The matrix is a list of (label, prediction, images) without zeros. Both are empty for more than MAX_CLASSES.
    """
    from sklearn.metrics import confusion_matrix, multilabel_confusion_matrix, roc_auc_score  # a second to import

    truth, predicted = labels.numpy(), probabilities.argmax(dim=1).numpy()
    present = np.union1d(truth, predicted)
    if not len(truth) or len(present) > MAX_CLASSES:
        return [], []
    scores = []
    for place, ((tn, fp), (fn, tp)) in zip(
        present, multilabel_confusion_matrix(truth, predicted, labels=present), strict=True
    ):
        images = int(tp + fn)
        if not images:
            continue
        is_mixed = images < len(truth)
        scores.append(
            ClassScores(
                label=classes[place],
                images=images,
                sensitivity=float(tp / images),
                specificity=float(tn / (tn + fp)) if is_mixed else None,
                auc=float(roc_auc_score(truth == place, probabilities[:, place].numpy())) if is_mixed else None,
            )
        )
    if len(present) == 1:  # scikit-learn warns about a matrix of one cell
        return scores, [(classes[present[0]], classes[present[0]], len(truth))]
    matrix = confusion_matrix(truth, predicted, labels=present)
    cells = [
        (classes[present[row]], classes[present[column]], int(matrix[row, column]))
        for row, column in np.argwhere(matrix)
    ]
    return scores, cells
