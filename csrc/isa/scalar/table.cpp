#include "generic/table.h"

HR_TABLE(scalar, 0)
